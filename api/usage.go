package api

import (
	"fmt"
	"net/url"
	"strings"
)

// Money is an amount in minor units of its currency, as a decimal string:
// {"2500","USD"} is 25 dollars.
type Money struct {
	Amount   string `json:"amount"`
	Currency string `json:"currency"`
}

// USD makes an amount from nanodollars, rounded half up to cents.
func USD(nano int64) Money {
	const perCent = 10_000_000
	return Money{Amount: fmt.Sprint((nano + perCent/2) / perCent), Currency: "USD"}
}

// maxAmountDigits bounds an amount so that it fits an int64 in nanodollars.
const maxAmountDigits = 11

func (m Money) validate(path string) error {
	digits := strings.Trim(m.Amount, "0123456789") == ""
	switch {
	case m.Amount == "" || !digits || m.Amount != "0" && strings.HasPrefix(m.Amount, "0"):
		return Invalid(path+".amount", "%q must be an integer in minor units without leading zeros, as a string: \"2500\" is 25 dollars", short(m.Amount))
	case len(m.Amount) > maxAmountDigits:
		return Invalid(path+".amount", "has %d digits; at most %d are allowed", len(m.Amount), maxAmountDigits)
	}
	return oneOf(path+".currency", m.Currency, "USD")
}

// Budget is a session's ceiling of list cost (reference section 14).
type Budget struct {
	Type        string `json:"type"` // limit
	MaxListCost Money  `json:"max_list_cost"`
}

func (b *Budget) validate(path string) error {
	if b == nil {
		return nil
	}
	if err := oneOf(path+".type", b.Type, "limit"); err != nil {
		return err
	}
	if b.MaxListCost.Amount == "0" {
		return Invalid(path+".max_list_cost.amount", "must be more than zero; leave the budget out for none")
	}
	return b.MaxListCost.validate(path + ".max_list_cost")
}

// CacheCreation splits cached input tokens by how long they are kept.
type CacheCreation struct {
	Ephemeral5m int64 `json:"ephemeral_5m_input_tokens"`
	Ephemeral1h int64 `json:"ephemeral_1h_input_tokens"`
}

// ServerToolUse counts calls of web tools.
type ServerToolUse struct {
	WebSearchRequests int64 `json:"web_search_requests"`
	WebFetchRequests  int64 `json:"web_fetch_requests"`
}

// Usage sums what a session or thread used (reference section 14).
type Usage struct {
	InputTokens          int64          `json:"input_tokens"`
	OutputTokens         int64          `json:"output_tokens"`
	CacheReadInputTokens int64          `json:"cache_read_input_tokens"`
	CacheCreation        CacheCreation  `json:"cache_creation"`
	ActiveSeconds        float64        `json:"active_seconds"`
	ListCost             *Money         `json:"list_cost,omitzero"`
	ServerToolUse        *ServerToolUse `json:"server_tool_use,omitzero"`
}

// ModelUsage is the usage of one model request (reference section 9.6).
type ModelUsage struct {
	InputTokens              int64  `json:"input_tokens"`
	OutputTokens             int64  `json:"output_tokens"`
	CacheCreationInputTokens int64  `json:"cache_creation_input_tokens"`
	CacheReadInputTokens     int64  `json:"cache_read_input_tokens"`
	Speed                    string `json:"speed,omitzero"`
}

// UsageParams selects rows of GET /v1/usage. Zero times are open ends.
type UsageParams struct {
	From, To Time
	// GroupBy is model (default), session, agent or day.
	GroupBy string
	Limit   int
	Page    string
}

// Query is the query string.
func (p UsageParams) Query() url.Values {
	q := url.Values{}
	setTime(q, "from", p.From)
	setTime(q, "to", p.To)
	setString(q, "group_by", p.GroupBy)
	setPage(q, p.Limit, p.Page)
	return q
}

// UsageRow is what one group used in the time asked for.
type UsageRow struct {
	Type  string `json:"type"` // usage_row
	Group string `json:"group"`
	Usage
	ModelRequests int64  `json:"model_requests"`
	Effects       int64  `json:"effects"`
	WastedTokens  int64  `json:"wasted_tokens"`
	WastedCost    *Money `json:"wasted_cost,omitzero"`
}

// MarshalJSON sets the type.
func (r UsageRow) MarshalJSON() ([]byte, error) {
	type shadow UsageRow
	r.Type = "usage_row"
	return Encode(shadow(r))
}

func setTime(q url.Values, key string, t Time) {
	if !t.IsZero() {
		q.Set(key, t.String())
	}
}

func setString(q url.Values, key, v string) {
	if v != "" {
		q.Set(key, v)
	}
}

func setPage(q url.Values, limit int, page string) {
	if limit > 0 {
		q.Set("limit", fmt.Sprint(limit))
	}
	setString(q, "page", page)
}
