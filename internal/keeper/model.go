package keeper

import (
	"context"
	"errors"

	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/store"
)

// Model types are llm's; session reaches them through gateway.
type (
	ModelRequest = llm.Request
	ModelReply   = llm.Reply
	ModelError   = llm.Error
	ModelDelta   = llm.Delta
	Message      = llm.Message
	Block        = llm.Block
	ModelTool    = llm.Tool
)

// ModelSpec is what is known of a model.
type ModelSpec struct {
	ContextWindow int
	MaxOutput     int
	Priced        bool
}

var errNoModels = errors.New("no models are configured; set ANTHROPIC_API_KEY, or add an entry to models in the config file")

// Model asks a model once. Errors are *ModelError, or say how to configure the
// model. Providers keep credentials out of their errors.
func (k *Keeper) Model(ctx context.Context, req ModelRequest, onDelta func(ModelDelta)) (*ModelReply, error) {
	if k.cfg.Models == nil {
		return nil, errNoModels
	}
	p, _, err := k.cfg.Models.For(req.Model)
	if err != nil {
		return nil, err
	}
	return p.Stream(ctx, req, onDelta)
}

// Spec returns limits of a model.
func (k *Keeper) Spec(model string) (ModelSpec, error) {
	if k.cfg.Models == nil {
		return ModelSpec{}, errNoModels
	}
	_, s, err := k.cfg.Models.For(model)
	if err != nil {
		return ModelSpec{}, err
	}
	return ModelSpec{ContextWindow: s.ContextWindow, MaxOutput: s.MaxOutput, Priced: s.Prices.Input > 0 || s.Prices.Output > 0}, nil
}

// Cost is the list cost of a request in 10⁻⁹ dollars; 0 when the model has no price.
func (k *Keeper) Cost(model string, u store.TokenUsage) int64 {
	if k.cfg.Models == nil {
		return 0
	}
	_, s, err := k.cfg.Models.For(model)
	if err != nil {
		return 0
	}
	return llm.Cost(llm.Usage{Input: u.Input, Output: u.Output, CacheRead: u.CacheRead,
		CacheCreation5m: u.CacheCreation5m, CacheCreation1h: u.CacheCreation1h}, s)
}
