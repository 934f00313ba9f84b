package sandbox_test

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/planaria/planaria/internal/sandbox"
)

// TestSlowRegistry: one tenant's registry never gives its layers. That holds up no
// other tenant's images, however many of them are asked for, and whatever digests
// it says that they have.
func TestSlowRegistry(t *testing.T) {
	slow, good := newWorld(t), newWorld(t)
	files := layer(t, archive(t, shellFile), types.DockerLayer)
	withheld, err := files.Digest()
	if err != nil {
		t.Fatal(err)
	}
	img := image(t, runtime.GOARCH, nil, files)
	var bad []string
	for i := range 8 {
		bad = append(bad, slow.push(t, fmt.Sprintf("slow:%d", i), image(t, runtime.GOARCH, []string{fmt.Sprintf("N=%d", i)}, files)))
	}
	same := slow.push(t, "same:1", img)
	stop, stalled := make(chan struct{}), make(chan struct{}, 100)
	slow.through(func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
			if strings.HasSuffix(req.URL.Path, "/blobs/"+withheld.String()) {
				stalled <- struct{}{}
				select {
				case <-req.Context().Done():
				case <-stop:
				}
				return
			}
			next.ServeHTTP(rw, req)
		})
	})
	defer func() { close(stop); slow.through(nil) }()
	r := openRoots(t)
	ask := func(workspace, ref string) <-chan error {
		done := make(chan error, 1)
		go func() {
			_, err := r.Image(t.Context(), workspace, ref)
			done <- err
		}()
		return done
	}
	ask("w1", same)
	<-stalled
	for _, ref := range bad {
		ask("w1", ref)
	}
	<-stalled
	select {
	case err := <-ask("w2", good.push(t, "good:1", img)):
		if err != nil {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("another tenant's image waits for the slow registry")
	}
	if err := r.Close(); err != nil && !errors.Is(err, sandbox.ErrImage) {
		t.Error(err)
	}
}

// TestImageAskedForMeanwhile: an image that is asked for while others are removed,
// which takes seconds, stays, although it was to go too: a sandbox may be on it.
func TestImageAskedForMeanwhile(t *testing.T) {
	w := newWorld(t)
	r := openRoots(t)
	ref := w.push(t, "img:1", image(t, runtime.GOARCH, nil, layer(t, archive(t, shellFile), types.DockerLayer)))
	root, err := r.Image(t.Context(), "w1", ref)
	if err != nil {
		t.Fatal(err)
	}
	old := time.Now().Add(-2 * time.Hour).Truncate(time.Second)
	dir := filepath.Dir(root.Dir)
	forget := func() {
		if err := os.Chtimes(filepath.Join(dir, "image.json"), old, old); err != nil {
			t.Fatal(err)
		}
	}
	forget()
	if _, err := r.Image(t.Context(), "w1", ref); err != nil {
		t.Fatal(err)
	}
	if gone, err := r.RemoveImage(dir, old); gone || err != nil {
		t.Errorf("removed %v, %v", gone, err)
	}
	if _, err := os.Stat(root.Dir); err != nil {
		t.Fatalf("it went: %v", err)
	}
	forget()
	if gone, err := r.RemoveImage(dir, old); !gone || err != nil {
		t.Errorf("nobody asked: removed %v, %v", gone, err)
	}
	if gone, err := r.RemoveImage(dir, old); gone || err != nil {
		t.Errorf("twice: removed %v, %v", gone, err)
	}
}
