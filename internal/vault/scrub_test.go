package vault_test

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"html"
	"io"
	"math/rand/v2"
	"net/url"
	"strings"
	"testing"
	"testing/iotest"

	"pgregory.net/rapid"

	"github.com/planaria/planaria/internal/vault"
)

// hostile has every character that some encoding treats specially.
const hostile = `sk-ant/A+b=c&d<e>"f'g\h i?j%k~l!(m)*`

// TestK2Encodings: attack K2. Whatever usual encoding a target echoes a secret
// in, nothing of use remains.
func TestK2Encodings(t *testing.T) {
	for _, secret := range []string{canary, hostile, "short6", "pässwört-ü"} {
		s := vault.NewScrubber(vault.NewSecret(secret))
		quoted := func(v string) string {
			b, err := json.Marshal(v)
			check(t, err)
			return string(b)
		}
		var percent, unicode strings.Builder
		for i := range len(secret) {
			fmt.Fprintf(&percent, "%%%02x", secret[i])
		}
		for _, r := range secret {
			fmt.Fprintf(&unicode, `\u%04x`, r)
		}
		echoes := map[string]string{
			"raw":         secret,
			"header":      "Authorization: Bearer " + secret + "\r\n",
			"hex":         hex.EncodeToString([]byte(secret)),
			"HEX":         strings.ToUpper(hex.EncodeToString([]byte(secret))),
			"query":       "?a=1&key=" + url.QueryEscape(secret) + "&b=2",
			"path":        "/v1/" + url.PathEscape(secret) + "/x",
			"all percent": percent.String(),
			"json":        `{"k":` + quoted(secret) + `}`,
			"json text":   `{"text":` + quoted(`{"k":`+quoted(secret)+`}`) + `}`,
			"json \\u":    unicode.String(),
			"json \\/":    strings.ReplaceAll(quoted(secret), "/", `\/`),
			"html":        "<p>" + html.EscapeString(secret) + "</p>",
		}
		for name, echo := range echoes {
			got, n := s.Scrub([]byte(echo))
			if n != 1 || !strings.Contains(string(got), vault.Redacted) {
				t.Errorf("%q %s: %d replacements in %q -> %q", secret, name, n, echo, got)
			}
		}
		if got, _ := s.Scrub([]byte("a " + secret + " b")); string(got) != "a REDACTED b" {
			t.Errorf("Scrub = %q", got)
		}
	}
}

// TestK2Base64 places the secret at all alignments, with all kinds of
// neighbours: at most the characters that hold bits of neighbours remain.
func TestK2Base64(t *testing.T) {
	for _, secret := range []string{canary, hostile, "sixteen-bytes-ab", "fifteen-bytes-a"} {
		s := vault.NewScrubber(vault.NewSecret(secret))
		for _, enc := range []*base64.Encoding{base64.StdEncoding, base64.RawStdEncoding, base64.URLEncoding, base64.RawURLEncoding} {
			for before := range 4 {
				for after := range 4 {
					plain := strings.Repeat("u", before) + secret + strings.Repeat("z", after)
					text := enc.EncodeToString([]byte(plain))
					for name, echo := range map[string]string{"plain": text, "query": url.QueryEscape(text)} {
						got, n := s.Scrub([]byte(echo))
						rest := len(got) - len(vault.Redacted)
						if n != 1 || rest > 2*before+2*after+4+3*2 {
							t.Errorf("%q base64 %s at %d,%d: %d replacements, %q -> %q", secret, name, before, after, n, echo, got)
						}
					}
				}
			}
		}
	}
}

// TestK3Chunks: attack K3. A secret split anywhere over chunks is found, and
// reader, writer and Scrub agree.
func TestK3Chunks(t *testing.T) {
	s := vault.NewScrubber(vault.NewSecret(canary), vault.NewSecret(hostile))
	text := "data: {\"a\":\"" + canary + "\"}\n\nx" + hostile + canary[:10] + canary + canary + base64.StdEncoding.EncodeToString([]byte("u:"+canary)) + canary[:5]
	want, count := s.Scrub([]byte(text))
	if count < 4 {
		t.Fatalf("%d replacements in %q", count, want)
	}
	for size := 1; size <= len(text); size++ {
		var out bytes.Buffer
		w := s.Writer(&out)
		for i := 0; i < len(text); i += size {
			if n, err := w.Write([]byte(text[i:min(i+size, len(text))])); err != nil || n == 0 {
				t.Fatal(n, err)
			}
		}
		check(t, w.Close())
		if out.String() != string(want) || w.Count() != count {
			t.Fatalf("chunks of %d: %q, want %q", size, out.String(), want)
		}
	}
	for name, src := range map[string]io.Reader{
		"whole": strings.NewReader(text), "bytewise": iotest.OneByteReader(strings.NewReader(text)),
		"with EOF": iotest.DataErrReader(strings.NewReader(text)),
	} {
		r := s.Reader(src)
		got, err := io.ReadAll(iotest.HalfReader(r))
		if err != nil || string(got) != string(want) || r.Count() != count {
			t.Errorf("Reader %s = %q, %v; want %q", name, got, err, want)
		}
	}
}

// TestScrubDelaysNothing: a complete event that holds no beginning of a secret
// passes at once, or streams would stall.
func TestScrubDelaysNothing(t *testing.T) {
	s := vault.NewScrubber(vault.NewSecret(canary))
	var out bytes.Buffer
	w := s.Writer(&out)
	for _, event := range []string{"event: ping\n\n", "data: {\"n\":1}\n\n"} {
		out.Reset()
		if _, err := w.Write([]byte(event)); err != nil {
			t.Fatal(err)
		}
		if out.String() != event {
			t.Errorf("passed %q of %q", out.String(), event)
		}
	}
	out.Reset()
	if _, err := w.Write([]byte("x" + canary[:8])); err != nil {
		t.Fatal(err)
	}
	if out.String() != "x" {
		t.Errorf("passed %q before the secret was complete", out.String())
	}
	check(t, w.Close())
	if out.String() != "x"+canary[:8] {
		t.Errorf("after Close %q", out.String())
	}
}

func TestScrubOverlap(t *testing.T) {
	s := vault.NewScrubber(vault.NewSecret("abcdefgh"), vault.NewSecret("efghijkl"), vault.NewSecret("abcdefghij"), vault.NewSecret("tiny"))
	for in, want := range map[string]string{
		"abcdefgh":             "REDACTED",
		"-abcdefghijkl-":       "-REDACTED-",
		"-abcdefghi":           "-REDACTEDi",
		"-abcdefghij-":         "-REDACTED-",
		"abcdefghabcdefgh":     "REDACTEDREDACTED",
		"abcdef efghijk tiny":  "abcdef efghijk tiny",
		"ababcdefgefghijklabc": "ababcdefgREDACTEDabc",
		"":                     "",
	} {
		if got, _ := s.Scrub([]byte(in)); string(got) != want {
			t.Errorf("Scrub(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestScrubHides(t *testing.T) {
	s := vault.NewScrubber(vault.NewSecret(canary))
	in := []byte("x" + canary)
	if _, _ = s.Scrub(in); string(in) != "x"+canary {
		t.Error("Scrub wrote into its argument")
	}
	clean := []byte("nothing here")
	if got, n := s.Scrub(clean); n != 0 || &got[0] != &clean[0] {
		t.Error("Scrub copied clean bytes")
	}
	if text := fmt.Sprintf("%v %+v %#v %s %d", s, s, s, s, s); strings.Contains(text, "canary") || strings.Contains(text, fmt.Sprint([]byte(canary)[:4])[1:10]) {
		t.Errorf("a dump shows the secret: %s", text)
	}
	if got, n := vault.NewScrubber().Scrub(in); n != 0 || string(got) != string(in) {
		t.Errorf("empty scrubber: %q", got)
	}
	w := s.Writer(errWriter{})
	if _, err := w.Write([]byte("abc")); !errors.Is(err, errBroken) {
		t.Errorf("Write = %v", err)
	}
	if err := w.Close(); !errors.Is(err, errBroken) {
		t.Errorf("Close = %v", err)
	}
	r := s.Reader(io.MultiReader(strings.NewReader("ab"+canary[:4]), iotest.ErrReader(errBroken)))
	if got, err := io.ReadAll(r); string(got) != "ab"+canary[:4] || !errors.Is(err, errBroken) {
		t.Errorf("Reader of a cut stream = %q, %v", got, err)
	}
}

var errBroken = errors.New("broken")

type errWriter struct{}

func (errWriter) Write([]byte) (int, error) { return 0, errBroken }

// TestScrubRandom: over a tiny alphabet, where matches overlap all the time,
// no secret is left and chunking changes nothing.
func TestScrubRandom(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		word := rapid.StringMatching(`[abc]{6,10}`)
		words := rapid.SliceOfN(word, 1, 4).Draw(t, "secrets")
		var secrets []vault.Secret
		for _, w := range words {
			secrets = append(secrets, vault.NewSecret(w))
		}
		s := vault.NewScrubber(secrets...)
		parts := rapid.SliceOfN(rapid.OneOf(rapid.StringMatching(`[abc]{0,12}`), rapid.SampledFrom(words)), 0, 8).Draw(t, "chunks")
		text := strings.Join(parts, "")
		want, _ := s.Scrub([]byte(text))
		for _, w := range words {
			if bytes.Contains(want, []byte(w)) {
				t.Fatalf("%q is left in %q", w, want)
			}
		}
		var out bytes.Buffer
		sw := s.Writer(&out)
		for _, p := range parts {
			if _, err := sw.Write([]byte(p)); err != nil {
				t.Fatal(err)
			}
		}
		if err := sw.Close(); err != nil || out.String() != string(want) {
			t.Fatalf("chunked %q, whole %q, %v", out.String(), want, err)
		}
	})
}

func BenchmarkScrub(b *testing.B) {
	var secrets []vault.Secret
	for i := range 20 {
		secrets = append(secrets, vault.NewSecret(fmt.Sprintf("sk-bench-%d-%s", i, canary)))
	}
	s := vault.NewScrubber(secrets...)
	rnd := rand.New(rand.NewPCG(1, 2))
	text := make([]byte, 1<<20)
	for i := range text {
		text[i] = byte(' ' + rnd.IntN(95))
	}
	b.SetBytes(int64(len(text)))
	for b.Loop() {
		s.Scrub(text)
	}
}
