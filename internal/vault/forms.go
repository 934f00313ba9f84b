package vault

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"html"
	"net/url"
	"strings"
)

// forms lists the spellings of a secret that are looked for. Duplicates and
// short ones are dropped by the caller.
func forms(secret string) []string {
	out := []string{secret}
	out = append(out, base64Forms(secret)...)
	lower := hex.EncodeToString([]byte(secret))
	out = append(out, lower, strings.ToUpper(lower))
	out = append(out, percentForms(secret)...)
	out = append(out, jsonForms(secret)...)
	out = append(out, html.EscapeString(secret))
	return out
}

// base64Forms gives what stays the same of the secret's base64 whatever stands
// before and after it: three alignments, both alphabets. Characters that also
// hold bits of a neighbour are left off. The standard alphabet is listed as it
// looks in a URL and in JSON too.
func base64Forms(secret string) []string {
	var out []string
	for shift := range 3 {
		padded := append(make([]byte, shift), secret...)
		from := (shift*8 + 5) / 6    // first character without bits of what stands before
		until := len(padded) * 8 / 6 // characters that the secret fills to the last bit
		std := base64.RawStdEncoding.EncodeToString(padded)[from:until]
		raw := base64.RawURLEncoding.EncodeToString(padded)[from:until]
		out = append(out, std, raw,
			url.QueryEscape(std), lowerEscapes(url.QueryEscape(std)),
			strings.ReplaceAll(std, "/", `\/`))
	}
	return out
}

// percentForms covers what usual libraries leave unescaped: form encoding,
// path encoding, encodeURIComponent, only unreserved characters, and nothing.
func percentForms(secret string) []string {
	strict := strings.ReplaceAll(url.QueryEscape(secret), "+", "%20")
	component := strings.NewReplacer("%21", "!", "%27", "'", "%28", "(", "%29", ")", "%2A", "*").Replace(strict)
	var all strings.Builder
	for i := range len(secret) {
		fmt.Fprintf(&all, "%%%02X", secret[i])
	}
	var out []string
	for _, f := range []string{url.QueryEscape(secret), strict, component, url.PathEscape(secret), all.String()} {
		out = append(out, f, lowerEscapes(f))
	}
	return out
}

// lowerEscapes spells the digits of percent escapes in lower case.
func lowerEscapes(s string) string {
	b := []byte(s)
	for i := 0; i+2 < len(b); i++ {
		if b[i] == '%' {
			copy(b[i+1:], strings.ToLower(s[i+1:i+3]))
			i += 2
		}
	}
	return string(b)
}

// jsonForms gives the inside of a JSON string: with and without the escapes
// for HTML, with escaped slashes, all as \u escapes, and a string inside a JSON
// text inside a string, as tools that return JSON as text have it.
func jsonForms(secret string) []string {
	var out []string
	for _, once := range []string{jsonInside(secret, false), jsonInside(secret, true)} {
		for _, f := range []string{once, strings.ReplaceAll(once, "/", `\/`)} {
			out = append(out, f, jsonInside(f, false), jsonInside(f, true))
		}
	}
	var lower, upper strings.Builder
	for _, r := range secret {
		if r > 0xffff {
			return out // a surrogate pair; credentials are ASCII
		}
		fmt.Fprintf(&lower, `\u%04x`, r)
		fmt.Fprintf(&upper, `\u%04X`, r)
	}
	return append(out, lower.String(), upper.String())
}

func jsonInside(s string, escapeHTML bool) string {
	var b strings.Builder
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(escapeHTML)
	if err := enc.Encode(s); err != nil {
		return s // strings always encode
	}
	quoted := strings.TrimSuffix(b.String(), "\n")
	return quoted[1 : len(quoted)-1]
}
