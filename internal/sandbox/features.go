package sandbox

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
)

// Features of processors. An image holds programs that have looked at the
// processor once and rely on what they saw, so it is restored only where all of
// that is there. Config.CPUFeatures shows them less, and so lets an image move
// to any machine that has at least this.
//
// Programs ask the processor itself, not only /proc/cpuinfo. Its answer can be
// changed only where it offers "cpuid faulting" (the flag cpuid_fault: Intel
// since 2012, hardly any virtual machine). Elsewhere a mask hides nothing that
// counts, so images keep asking for all features of their machine; Check says it.

// levels are names for sets of features (System V ABI, AMD64 supplement),
// beside what every such processor has.
var levels = map[string][]string{
	"x86-64-v2": {"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"},
	"x86-64-v3": {"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3",
		"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"},
}

// baseFeatures belong to every level. osxsave is not shown in /proc/cpuinfo;
// without it programs do not use AVX.
var baseFeatures = []string{
	"fpu", "vme", "de", "pse", "tsc", "msr", "pae", "mce", "cx8", "apic", "sep", "mtrr", "pge", "mca", "cmov", "pat", "pse36",
	"clflush", "mmx", "fxsr", "sse", "sse2", "ht", "syscall", "nx", "lm", "hypervisor",
}

const hiddenFeature = "osxsave"

// machineFeatures are the features of this machine's processors, sorted.
var machineFeatures = sync.OnceValue(func() []string {
	b, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(b)) {
		name, value, ok := strings.Cut(line, ":")
		if n := strings.TrimSpace(name); ok && (n == "flags" || n == "Features") {
			flags := strings.Fields(value)
			slices.Sort(flags)
			return flags
		}
	}
	return nil
})

// mask makes what sandboxes of this machine show of its features: nil for all.
func mask(allowed []string) ([]string, error) {
	if len(allowed) == 0 {
		return nil, nil
	}
	if runtime.GOARCH != "amd64" {
		return nil, errors.New("features of processors can be hidden on amd64 only")
	}
	out := slices.Clone(baseFeatures)
	for _, name := range allowed {
		if strings.ContainsAny(name, ", ") || name == "" {
			return nil, fmt.Errorf("feature %.40q of the processor: not a name", name)
		}
		if level, ok := levels[name]; ok {
			for _, f := range level {
				if !slices.Contains(machineFeatures(), f) {
					return nil, fmt.Errorf("this machine's processor is below %s: it has no %s", name, f)
				}
			}
			out = append(out, level...)
		} else {
			out = append(out, name)
		}
	}
	out = slices.DeleteFunc(out, func(f string) bool { return !slices.Contains(machineFeatures(), f) })
	slices.Sort(out)
	return slices.Compact(out), nil
}

// canHide tells whether programs inside can be kept from seeing features.
func canHide() bool { return slices.Contains(machineFeatures(), "cpuid_fault") }

// relied are the features that programs of a new sandbox may come to rely on.
func (r *Runtime) relied() []string {
	if r.mask != nil && canHide() {
		return r.mask
	}
	return machineFeatures()
}

// probeFeatures says whether features can be hidden.
func probeFeatures() Finding {
	f := Finding{What: "cpu features", OK: true, Says: "can be hidden, so that snapshots move between unlike processors"}
	if !canHide() {
		f.OK, f.Says = false, "cannot be hidden: snapshots move to machines whose processor has all of this one's features"
		f.Mend = "none needed on one kind of machine; else run on processors that offer cpuid faulting (flag cpuid_fault)"
	}
	return f
}

// featuresAnnotation tells gVisor what to show; empty for all.
func featuresAnnotation(features []string) string {
	if len(features) == 0 {
		return ""
	}
	return strings.Join(append(slices.Clone(features), hiddenFeature), ",")
}

// checkFeatures tells whether an image can be restored on this machine.
func checkFeatures(m *Manifest) error {
	if len(m.CPUFeatures) == 0 {
		if m.CPU != cpuDigest() {
			return fmt.Errorf("the processor has other features than the one of the snapshot: %w", ErrUnsupported)
		}
		return nil
	}
	var missing []string
	for _, f := range m.CPUFeatures {
		if !slices.Contains(machineFeatures(), f) {
			missing = append(missing, f)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("the processor lacks what the one of the snapshot had: %s: %w", strings.Join(missing, " "), ErrUnsupported)
	}
	return nil
}

// cpuDigest names all features of this machine's processors.
func cpuDigest() string {
	if len(machineFeatures()) == 0 {
		return ""
	}
	sum := sha256.Sum256([]byte(strings.Join(machineFeatures(), " ")))
	return hex.EncodeToString(sum[:])
}
