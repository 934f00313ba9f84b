package main

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// sample is durations of one thing.
type sample []time.Duration

// quantile is the value that a share q of the sample does not exceed.
func (s sample) quantile(q float64) time.Duration {
	if len(s) == 0 {
		return 0
	}
	sorted := slices.Clone(s)
	slices.Sort(sorted)
	return sorted[min(len(sorted)-1, int(q*float64(len(sorted))))]
}

func (s sample) median() time.Duration { return s.quantile(0.5) }
func (s sample) p99() time.Duration    { return s.quantile(0.99) }

// table prints one Markdown table.
type table struct {
	title string
	head  []string
	rows  [][]string
	notes []string
}

func (t *table) row(cells ...string) { t.rows = append(t.rows, cells) }
func (t *table) note(format string, args ...any) {
	t.notes = append(t.notes, fmt.Sprintf(format, args...))
}

func (t *table) print() {
	var b bytes.Buffer
	fmt.Fprintf(&b, "### %s\n\n| %s |\n|%s\n", t.title, strings.Join(t.head, " | "), strings.Repeat(" --- |", len(t.head)))
	for _, r := range t.rows {
		fmt.Fprintf(&b, "| %s |\n", strings.Join(r, " | "))
	}
	b.WriteByte('\n')
	for _, n := range t.notes {
		fmt.Fprintf(&b, "%s\n", n)
	}
	if len(t.notes) > 0 {
		b.WriteByte('\n')
	}
	_, _ = os.Stdout.Write(b.Bytes())
}

// ms is a duration in milliseconds with three significant digits or so.
func ms(d time.Duration) string {
	v := float64(d) / float64(time.Millisecond)
	switch {
	case v >= 100:
		return fmt.Sprintf("%.0f ms", v)
	case v >= 10:
		return fmt.Sprintf("%.1f ms", v)
	case v >= 1:
		return fmt.Sprintf("%.2f ms", v)
	}
	return fmt.Sprintf("%.3f ms", v)
}

func ratio(a, b time.Duration) string {
	if b == 0 {
		return "–"
	}
	return fmt.Sprintf("%.2f", float64(a)/float64(b))
}

func percent(a, b float64) string {
	if b == 0 {
		return "–"
	}
	return fmt.Sprintf("%.0f %%", 100*a/b)
}

func count(v float64) string {
	s := strconv.FormatFloat(v, 'f', 0, 64)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

func mib(bytes int64) string { return fmt.Sprintf("%.1f MiB", float64(bytes)/(1<<20)) }

// verdict says whether a target is met.
func verdict(ok bool) string {
	if ok {
		return "met"
	}
	return "missed"
}

// cpuTime is what this process has used of all cores.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// machine describes where the figures come from, without names.
func machine() string {
	out := fmt.Sprintf("%d cores", runtime.NumCPU()) + hardware()
	load, err := os.ReadFile("/proc/loadavg")
	if err == nil {
		first, _, _ := strings.Cut(string(load), " ")
		out += ", load " + first + " at the start"
	}
	return out + ", " + runtime.Version()
}
