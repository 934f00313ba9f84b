package sandbox_test

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/sandbox"
)

// TestFigures measures what design section 6 has targets for, when
// PLANARIA_FIGURES is set: medians of five.
func TestFigures(t *testing.T) {
	if os.Getenv("PLANARIA_FIGURES") == "" {
		t.Skip("PLANARIA_FIGURES is not set")
	}
	e := open(t)
	load := func() string { b, _ := os.ReadFile("/proc/loadavg"); return strings.Fields(string(b))[0] }
	report := func(what string, f func()) {
		var d []time.Duration
		for range 5 {
			began := time.Now()
			f()
			d = append(d, time.Since(began))
		}
		slices.Sort(d)
		t.Logf("%-36s median %7.1f ms  (%.1f to %.1f)  load %s", what, ms(d[2]), ms(d[0]), ms(d[4]), load())
	}
	n := 0
	name := func() string { n++; return fmt.Sprintf("f%03d", n) }
	spec := sandbox.Spec{}
	report("start to first answer, no pool", func() { e.sh(e.start(name()), "true") })
	if err := e.r.Warm(t.Context(), spec, 5); err != nil {
		t.Fatal(err)
	}
	report("start to first answer, pool", func() { e.sh(e.start(name()), "true") })
	s := e.start(name())
	e.do(s, "write", in{"file_path": "f", "content": "x"})
	report("read a file", func() { e.do(s, "read", in{"file_path": "f"}) })
	report("shell builtin", func() { e.sh(s, "true") })
	report("exec true", func() { e.sh(s, "/bin/true") })
	for _, mb := range []int{0, 10, 200, 1000} {
		s := e.start(name(), func(s *sandbox.Spec) { s.Limits.MemoryBytes = 3 << 30 })
		if mb > 0 {
			e.sh(s, fmt.Sprintf("head -c %d /dev/urandom > /dev/shm/big", mb<<20))
		}
		var m *sandbox.Manifest
		var pause, sync, verify []int64
		report(fmt.Sprintf("snapshot whole, %d MB", mb), func() {
			if m != nil {
				_ = e.r.DropImage(m.ID)
			}
			m = e.snapshot(s)
			pause, sync, verify = append(pause, m.Took.Checkpoint), append(sync, m.Took.Sync), append(verify, m.Took.Verify)
		})
		for _, p := range []*[]int64{&pause, &sync, &verify} {
			slices.Sort(*p)
		}
		t.Logf("  of that checkpoint %d, sync %d, verify %d ms; image %d KiB", pause[2], sync[2], verify[2], m.Size()>>10)
		spec := sandbox.Spec{Limits: m.Limits}
		if err := e.r.Warm(t.Context(), spec, 5); err != nil {
			t.Fatal(err)
		}
		report(fmt.Sprintf("restore to first answer, pool, %d MB", mb), func() {
			c, _ := e.restore(m, name())
			e.sh(c, "true")
			if mb >= 200 {
				_ = c.Kill(t.Context())
			}
		})
		_ = e.r.DropImage(m.ID)
	}
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
