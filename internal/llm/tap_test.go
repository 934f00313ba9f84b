package llm_test

import (
	"bytes"
	"io"
	"net/http"
)

// tap records the last request body that passes.
type tap struct {
	next http.RoundTripper
	body *string
}

func (t *tap) RoundTrip(r *http.Request) (*http.Response, error) {
	b, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	*t.body = string(b)
	r = r.Clone(r.Context())
	r.Body = io.NopCloser(bytes.NewReader(b))
	return t.next.RoundTrip(r)
}
