package keeper_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/planaria/planaria/internal/keeper"
)

func TestOfferable(t *testing.T) {
	for schema, want := range map[string]bool{
		`{"type":"object"}`: true,
		`{"type":"object","properties":{"a.b-c_1":{"oneOf":[{"type":"string"}]}}}`: true,
		`{"type":"string"}`:              false,
		`{}`:                             false,
		`null`:                           false,
		``:                               false,
		`{"type":"object","oneOf":[]}`:   false,
		`{"type":"object","anyOf":[{}]}`: false,
		`{"type":"object","allOf":[{}]}`: false,
		`{"type":"object","properties":{"two words":{}}}`:                       false,
		`{"type":"object","properties":{"":{}}}`:                                false,
		`{"type":"object","properties":{"` + strings.Repeat("x", 65) + `":{}}}`: false,
	} {
		if got := keeper.Offerable(json.RawMessage(schema)); got != want {
			t.Errorf("offerable(%.80s) = %v, want %v", schema, got, want)
		}
	}
}
