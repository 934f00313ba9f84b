package gateway_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/planaria/planaria/internal/gateway"
)

// install runs a package manager outside of a sandbox, through the proxy of an
// environment that allows package managers and nothing else.
func install(t *testing.T, o *outside, a *authority, dir, command, want string) {
	t.Helper()
	proxy, stop := o.inside(gateway.Network{PackageManagers: true}).proxy()
	ca := filepath.Join(dir, "ca.pem")
	if err := os.WriteFile(ca, a.pem, 0o644); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("bash", "-c", command)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "http_proxy="+proxy, "https_proxy="+proxy, "HTTP_PROXY="+proxy, "HTTPS_PROXY="+proxy,
		"CARGO_HTTP_CAINFO="+ca, "SSL_CERT_FILE="+ca)
	out, err := cmd.CombinedOutput()
	stop()
	if err != nil || !strings.HasSuffix(string(out), want+"\n") {
		t.Errorf("%s: %v\n%s\nwant %q; tunnels %+v", command, err, out, want, o.ended)
	}
	if o.tunnels() == 0 {
		t.Error("it did not go through the proxy")
	}
}

// The real cargo installs a program with the words that environments use
// (reference section 4.4).
func TestEgressCargo(t *testing.T) {
	if out, err := exec.Command("cargo", "--version").CombinedOutput(); err != nil {
		t.Skipf("cargo is missing: %v %s", err, out)
	}
	var crate bytes.Buffer
	zw := gzip.NewWriter(&crate)
	tw := tar.NewWriter(zw)
	for name, text := range map[string]string{
		"tinycrate-1.0.0/Cargo.toml":  "[package]\nname = \"tinycrate\"\nversion = \"1.0.0\"\n",
		"tinycrate-1.0.0/src/main.rs": "fn main() { println!(\"tiny from cargo\"); }\n",
	} {
		if err := tw.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(text))}); err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(tw, text)
	}
	if tw.Close() != nil || zw.Close() != nil {
		t.Fatal("make crate")
	}
	o, a := newOutside(t), newAuthority(t)
	mux := http.NewServeMux()
	mux.HandleFunc("GET index.crates.io/config.json", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"dl":"https://static.crates.io/crates","api":"https://crates.io"}`)
	})
	mux.HandleFunc("GET index.crates.io/ti/ny/tinycrate", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprintf(w, `{"name":"tinycrate","vers":"1.0.0","deps":[],"cksum":"%x","features":{},"yanked":false}`+"\n", sha256.Sum256(crate.Bytes()))
	})
	mux.HandleFunc("GET static.crates.io/crates/tinycrate/1.0.0/download", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(crate.Bytes()) })
	o.serveTLS(a, "index.crates.io:443", mux)
	o.serveTLS(a, "static.crates.io:443", mux)
	install(t, o, a, t.TempDir(), "CARGO_HOME=$PWD/home CARGO_TARGET_DIR=$PWD/target cargo install --root $PWD/cargo 'tinycrate@1.0.0' && cargo/bin/tinycrate", "tiny from cargo")
}

// makeGem writes a gem with one program, and its specification as the index has it.
const makeGem = `require "rubygems/package"
require "zlib"
Dir.mkdir "bin"
File.write "bin/tinygem", "#!/usr/bin/env ruby\nputs 'tiny from gem'\n"
s = Gem::Specification.new do |x|
  x.name, x.version, x.summary, x.license, x.homepage = "tinygem", "1.0.0", "t", "MIT", "https://example.test"
  x.authors, x.files, x.executables = ["t"], ["bin/tinygem"], ["tinygem"]
end
Gem::Package.build s
File.binwrite "spec", Zlib::Deflate.deflate(Marshal.dump(s))`

// The real gem installs a program with the words that environments use (reference
// section 4.4).
func TestEgressGem(t *testing.T) {
	if out, err := exec.Command("gem", "--version").CombinedOutput(); err != nil {
		t.Skipf("gem is missing: %v %s", err, out)
	}
	dir := t.TempDir()
	cmd := exec.Command("ruby", "-e", makeGem)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("make gem: %v %s", err, out)
	}
	gem, err := os.ReadFile(filepath.Join(dir, "tinygem-1.0.0.gem"))
	if err != nil {
		t.Fatal(err)
	}
	spec, err := os.ReadFile(filepath.Join(dir, "spec"))
	if err != nil {
		t.Fatal(err)
	}
	index := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/", "/versions": // versions of gem ask one or the other whether it is an index
			_, _ = io.WriteString(w, "created_at: 2026-01-01T00:00:00Z\n---\ntinygem 1.0.0 0\n")
		case "/info/tinygem":
			_, _ = fmt.Fprintf(w, "---\n1.0.0 |checksum:%x\n", sha256.Sum256(gem))
		case "/quick/Marshal.4.8/tinygem-1.0.0.gemspec.rz":
			_, _ = w.Write(spec)
		case "/gems/tinygem-1.0.0.gem":
			_, _ = w.Write(gem)
		default:
			http.NotFound(w, r)
		}
	})
	o, a := newOutside(t), newAuthority(t)
	o.serveTLS(a, "index.rubygems.org:443", index)
	o.serveTLS(a, "rubygems.org:443", index)
	install(t, o, a, dir, "export HOME=$PWD; gem install --no-document --install-dir $PWD/gem --bindir $PWD/gem/bin 'tinygem:1.0.0' && GEM_PATH=$PWD/gem: gem/bin/tinygem", "tiny from gem")
}
