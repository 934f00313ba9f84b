package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/sandbox"
)

// roomOf opens a Runtime that admits up to so many bytes.
func roomOf(t *testing.T, bytes int64) *sandbox.Runtime {
	t.Helper()
	r, err := sandbox.Open(t.Context(), sandbox.Config{Dir: t.TempDir(), MemoryBytes: bytes})
	if errors.Is(err, sandbox.ErrUnsupported) {
		t.Skipf("no sandboxes here: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	return r
}

// TestAdmission: limits do not count, use does. A thousand small sandboxes with
// a limit of 2 GiB fit into 24 GiB.
func TestAdmission(t *testing.T) {
	r := roomOf(t, 24<<30)
	limits := sandbox.Limits{MemoryBytes: 2 << 30}
	for i := range 1000 {
		// What one uses that runs: held as a promise that stays.
		if _, err := r.Admit(t.Context(), 22<<20, limits, false); err != nil {
			t.Fatalf("sandbox %d: %v", i, err)
		}
	}
	held := 0
	var err error
	for err == nil && held < 1000 {
		_, err = r.Admit(t.Context(), 22<<20, limits, false)
		held++
	}
	var full *sandbox.FullError
	if !errors.Is(err, sandbox.ErrFull) || !errors.As(err, &full) {
		t.Fatalf("after %d more: %v", held, err)
	}
	if full.Limit != 24<<30 || full.Need != 22<<20 || full.Free >= full.Need || !strings.Contains(err.Error(), "suspend") {
		t.Errorf("the error says %+v: %v", full, err)
	}
	if _, err := r.Admit(t.Context(), 25<<30, limits, true); !errors.Is(err, sandbox.ErrFull) {
		t.Errorf("one that can never fit waits: %v", err)
	}
}

// TestAdmissionIsFair: who waits is served in order, and who does not wait never
// overtakes.
func TestAdmissionIsFair(t *testing.T) {
	r := roomOf(t, 320<<20) // 20 MiB are kept free
	limits := sandbox.Limits{}
	all, err := r.Admit(t.Context(), 300<<20, limits, false)
	if err != nil {
		t.Fatal(err)
	}
	order := make(chan int, 3)
	waitFor := func(n int) {
		for r.Stats().Waiting != n {
			select {
			case <-time.After(time.Millisecond):
			case <-t.Context().Done():
				return
			}
		}
	}
	for i, need := range []int64{200 << 20, 10 << 20, 10 << 20} {
		go func() {
			if _, err := r.Admit(t.Context(), need, limits, true); err != nil {
				t.Error(err)
			}
			order <- i
		}()
		waitFor(i + 1)
	}
	short, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := r.Admit(short, 1<<20, limits, true); !errors.Is(err, sandbox.ErrFull) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a wait that ends: %v", err)
	}
	if _, err := r.Admit(t.Context(), 1<<20, limits, false); !errors.Is(err, sandbox.ErrFull) {
		t.Errorf("one that does not wait overtakes: %v", err)
	}
	all()
	for want := range 3 {
		if got := <-order; want == 0 && got != 0 {
			t.Errorf("admitted %d first", got)
		}
	}
}

// TestStats: memory and processor time of a real sandbox, and a start that is
// refused because of them.
func TestStats(t *testing.T) {
	e := open(t)
	s := e.start("stats")
	before, err := s.Stats()
	if err != nil {
		t.Fatal(err)
	}
	e.sh(s, "head -c 100000000 /dev/zero > /dev/shm/big; timeout 1 sh -c 'while :; do :; done' || true")
	began := time.Now()
	after, err := s.Stats()
	took := time.Since(began)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("at rest %d MiB, %v; later %d MiB, %v; asked in %v", before.Memory>>20, before.CPU, after.Memory>>20, after.CPU, took)
	if grown := (after.Memory - before.Memory) >> 20; grown < 90 || grown > 150 {
		t.Errorf("100 MB in a file in memory count as %d MiB", grown)
	}
	if used := after.CPU - before.CPU; os.Geteuid() == 0 && used < 100*time.Millisecond {
		t.Errorf("a second of work counts as %v", used)
	}
	m := e.snapshot(s)
	if err := e.r.Close(); err != nil {
		t.Fatal(err)
	}
	e.reopen(sandbox.Config{Dir: e.dir, Binary: binary(t), Blobs: e.blobs, MemoryBytes: 150 << 20})
	if sum := e.r.Stats(); sum.Sandboxes != 1 || sum.Memory < 90<<20 || sum.Limit != 150<<20 {
		t.Errorf("sums: %+v", sum)
	}
	spec := sandbox.Spec{Workspace: "w1", ID: "more", Fence: 1}
	if _, err := e.r.Start(t.Context(), spec); !errors.Is(err, sandbox.ErrFull) {
		t.Errorf("start: %v", err)
	} else {
		t.Log(err)
	}
	if _, _, err := e.r.Restore(t.Context(), m, spec); !errors.Is(err, sandbox.ErrFull) {
		t.Errorf("restore: %v", err)
	}
	// Who waits gets the room of the one that goes.
	spec.Wait = true
	done := make(chan error, 1)
	go func() {
		_, err := e.r.Start(t.Context(), spec)
		done <- err
	}()
	for e.r.Stats().Waiting == 0 {
		<-time.After(time.Millisecond)
	}
	old, err := e.r.Find(t.Context(), "w1", "stats", 2)
	if err != nil {
		t.Fatal(err)
	}
	if err := old.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Errorf("who waited: %v", err)
	}
	if _, err := old.Stats(); !errors.Is(err, sandbox.ErrGone) {
		t.Errorf("numbers of a dead one: %v", err)
	}
}

// TestCPUFeatures: what is hidden is hidden from programs too, and a masked
// image asks no more of a machine than it shows.
func TestCPUFeatures(t *testing.T) {
	t.Parallel()
	if _, err := sandbox.Open(t.Context(), sandbox.Config{Dir: t.TempDir(), CPUFeatures: []string{"a,b"}}); err == nil {
		t.Error("a wrong name was taken")
	}
	info, err := os.ReadFile("/proc/cpuinfo")
	if err != nil || !strings.Contains(string(info), " avx2 ") {
		t.Skip("this processor is below x86-64-v3: nothing can be hidden from it")
	}
	hides := strings.Contains(string(info), " cpuid_fault ")
	wide := strings.Contains(string(info), " avx512f ")
	e := open(t, func(c *sandbox.Config) { c.CPUFeatures = []string{"x86-64-v3", "aes", "pclmulqdq", "rdrand"} })
	s := e.start("masked")
	look := func(s *sandbox.Sandbox) {
		t.Helper()
		if got := e.sh(s, "grep -c avx512 /proc/cpuinfo || true"); got != "0" {
			t.Errorf("avx512 shows on %s lines", got)
		}
		if got := e.sh(s, "grep -m1 -o -w avx2 /proc/cpuinfo"); got != "avx2" {
			t.Errorf("avx2 does not show: %q", got)
		}
		// The dynamic linker asks the processor itself.
		r := e.do(s, "bash", in{"command": "/lib64/ld-linux-x86-64.so.2 --help | grep x86-64-v"})
		if r.IsError {
			t.Logf("the linker does not tell levels: %s", r.Text)
		} else if hides && strings.Contains(r.Text, "v4 (supported") || !strings.Contains(r.Text, "v3 (supported") {
			t.Errorf("the linker sees: %s", r.Text)
		}
	}
	look(s)
	m := e.snapshot(s)
	for _, f := range m.CPUFeatures {
		if hides && strings.HasPrefix(f, "avx512") {
			t.Errorf("the manifest asks for %s", f)
		}
	}
	// Where programs can look past the mask, an image asks for all they saw.
	if !hides && wide && !slices.Contains(m.CPUFeatures, "avx512f") {
		t.Errorf("the manifest asks for %v only", m.CPUFeatures)
	}
	// Restored where the machine has more than the image needs: here, and by a
	// Runtime that hides nothing.
	other := *m
	other.CPU = "of another machine"
	c, _ := e.restore(&other, "copy")
	look(c)
	if err := e.r.Close(); err != nil {
		t.Fatal(err)
	}
	e.reopen(sandbox.Config{Dir: e.dir, Binary: binary(t), Blobs: e.blobs})
	c2, _ := e.restore(m, "copy2")
	look(c2)
	m2 := e.snapshot(c2)
	if fmt.Sprint(m2.CPUFeatures) != fmt.Sprint(m.CPUFeatures) {
		t.Errorf("its next snapshot asks for %v", m2.CPUFeatures)
	}
	plain := e.start("plain")
	if got := e.sh(plain, "grep -c avx512f /proc/cpuinfo || true"); wide && got == "0" {
		t.Error("without a mask avx512 is hidden")
	}
	// An image of a better processor is refused before anything starts.
	other.CPUFeatures = append(other.CPUFeatures, "of_tomorrow")
	if _, _, err := e.r.Restore(t.Context(), &other, sandbox.Spec{Workspace: "w1", ID: "never", Fence: 1}); !errors.Is(err, sandbox.ErrUnsupported) || !strings.Contains(err.Error(), "of_tomorrow") {
		t.Errorf("an image of a better processor: %v", err)
	}
}
