package session_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/planaria/planaria/internal/sandbox"
	"github.com/planaria/planaria/internal/session"
)

// What is said of files that were left names the first of them and stays short,
// whatever names the agent chose (attack F2).
func TestLeftNamed(t *testing.T) {
	file := func(name string, size int64) sandbox.File {
		return sandbox.File{Path: sandbox.Outputs + "/" + name, Size: size}
	}
	var many, long []sandbox.File
	for i := range 9000 {
		many = append(many, file(fmt.Sprintf("n/%04d", i), int64(i)))
		long = append(long, file(strings.Repeat("\x01é", 2000)+fmt.Sprint(i), 1<<40))
	}
	for name, tt := range map[string]struct {
		files []sandbox.File
		want  string
	}{
		"one":     {many[:1], `("n/0000" of 0 bytes)`},
		"sizes":   {[]sandbox.File{file("a", 1023), file("b", 1536), file("c", 501<<20)}, `("a" of 1023 bytes, "b" of 1.5 KiB, "c" of 501.0 MiB)`},
		"hostile": {[]sandbox.File{file("a\n\x1b[31m\"", 1)}, `("a\n\x1b[31m\"" of 1 byte)`},
		"many":    {many, `("n/0000" of 0 bytes, "n/0001" of 1 byte, "n/0002" of 2 bytes, "n/0003" of 3 bytes, "n/0004" of 4 bytes, and 8995 more)`},
	} {
		if got := session.LeftNamed(tt.files); got != tt.want {
			t.Errorf("%s: %s, want %s", name, got, tt.want)
		}
	}
	if got := session.LeftNamed(long); len(got) > 4<<10 || !strings.Contains(got, "…") || !strings.HasSuffix(got, ", and 8995 more)") {
		t.Errorf("long names: %d bytes: %.300s", len(got), got)
	}
}
