package main

import (
	"strings"
	"testing"
	"time"
)

// One bad minute in one round does not decide what snapshots add, and rounds that
// disagree are said to.
func TestOverhead(t *testing.T) {
	const s = time.Second
	bare := runTimes{{s, 2 * s}, {s, 2 * s}, {s, 2 * s}, {s, 9 * s}, {s, 2 * s}}
	saved := runTimes{{9 * s, 2 * s}, {s, 2 * s}, {s, 9 * s}, {s, 9 * s}, {s, 2 * s}}
	if got := saved.work(); got != bare.work() || got != 3*s {
		t.Errorf("work is %v, without snapshots %v", got, bare.work())
	}
	extra := saved.beyond(bare)
	if got := extra.work(); got != 0 {
		t.Errorf("snapshots add %v", got)
	}
	if low, high := spread(extra, bare, 7*s); low != 0 || high != 70 {
		t.Errorf("spread %v to %v %%, want 0 to 70", low, high)
	}
	for _, tt := range []struct {
		sum, low, high float64
		want           string
	}{
		{1, -1, 2.9, "met (+1.0 %)"},
		{5, 3.1, 9, "missed (+5.0 %)"},
		{1, -4, 5, "not decided (+1.0 %)"},
		{4, 1, 2, "not decided (+4.0 %)"},
	} {
		if got := decided(tt.sum, tt.low, tt.high); !strings.HasPrefix(got, tt.want) {
			t.Errorf("%v, %v to %v: %q, want %q", tt.sum, tt.low, tt.high, got, tt.want)
		}
	}
}
