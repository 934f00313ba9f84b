package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/session"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/vault"
)

// attach makes the resources of a session that is created: a copy of each file,
// which is the session's own, and the sealed token of each repository. All of it
// commits with the session.
func (s *server) attach(ctx context.Context, c *call, asked []api.ResourceParams, p *session.CreateParams) error {
	if len(asked) == 0 {
		return nil
	}
	var env api.EnvironmentConfig
	if err := api.Decode(p.Environment, &env); err != nil {
		return fmt.Errorf("read environment: %w", internal(err))
	}
	all := make([]api.Resource, 0, len(asked))
	begin := s.db.Now()
	for i, a := range asked {
		at := fmt.Sprintf("resources[%d]", i)
		if a.Type == api.ResourceMemory {
			return api.Missing("memory store", a.MemoryStoreID) // this version keeps none
		}
		if env.Type == api.EnvironmentSelfHosted {
			return api.Invalid(at+".type", "%q is not possible in a self_hosted environment, whose machine is not ours; leave it out", a.Type)
		}
		now := begin.Add(time.Duration(i) * time.Microsecond) // no two are equal, see behind
		id, copied := store.NewID("sesrsc_", now), ""
		if a.Type == api.ResourceFile {
			f, err := s.fileByID(ctx, c, a.FileID)
			if err != nil {
				return err
			}
			copied = store.NewID("file_", now)
			p.Attach.Files = append(p.Attach.Files, store.FileCopy{From: f.ID, To: store.FileID(copied)})
		}
		if a.AuthorizationToken != "" {
			secret, err := s.sealToken(c, id, a.AuthorizationToken)
			if err != nil {
				return err
			}
			p.Attach.Secrets = append(p.Attach.Secrets, secret)
		}
		r, err := a.Resolve(id, copied, api.At(now))
		if err != nil {
			return err
		}
		all = append(all, r)
	}
	var err error
	p.Resources, err = api.Encode(all)
	return err
}

// sealToken seals the token of a repository for its resource. It is in no answer,
// log, event or idempotency record.
func (s *server) sealToken(c *call, id string, token api.Secret) (store.ResourceSecret, error) {
	sealed, err := s.cfg.Master.Seal(c.caller.Workspace, id, vault.NewSecret(token.Reveal()))
	if err != nil {
		return store.ResourceSecret{}, fmt.Errorf("seal token of resource %s: %w", id, err)
	}
	return store.ResourceSecret{ID: id, Sealed: sealed}, nil
}

// resources reads the session of the request and its resources.
func (s *server) resources(ctx context.Context, c *call) (store.Session, []json.RawMessage, error) {
	x, err := s.session(ctx, c)
	if err != nil {
		return x, nil, err
	}
	var all []json.RawMessage
	if len(x.Config.Resources) > 0 {
		if err := json.Unmarshal(x.Config.Resources, &all); err != nil {
			return x, nil, fmt.Errorf("read resources of session %s: %w", x.ID, err)
		}
	}
	return x, all, nil
}

func (s *server) listResources(ctx context.Context, c *call) (any, error) {
	limit, err := c.query.limit(1000, 1000)
	if err != nil {
		return nil, err
	}
	at, err := c.query.cursor("resources", "asc")
	if err != nil {
		return nil, err
	}
	_, all, err := s.resources(ctx, c)
	if err != nil {
		return nil, err
	}
	from := 0
	if at != nil {
		if from, err = behind(all, *at); err != nil {
			return nil, fmt.Errorf("read resources of session %s: %w", c.id("session"), err)
		}
	}
	out := api.Page[json.RawMessage]{Data: all[from:min(from+limit, len(all))]}
	if from+limit < len(all) {
		last, err := placeOf(all[from+limit-1])
		if err != nil {
			return nil, err
		}
		out.NextPage = next(last)
	}
	return out, nil
}

// placeOf is the cursor behind a resource: its id, and for when it is deleted
// meanwhile, its time.
func placeOf(raw json.RawMessage) (cursor, error) {
	var r api.Resource
	if err := api.Decode(raw, &r); err != nil {
		return cursor{}, internal(err)
	}
	return cursor{List: "resources", Order: "asc", At: r.CreatedAt.UnixMicro(), ID: r.ID}, nil
}

// behind is the index of the first resource behind a cursor. They stand in the
// order of their times, no two of which are equal.
func behind(all []json.RawMessage, c cursor) (int, error) {
	later := len(all)
	for i := len(all) - 1; i >= 0; i-- {
		at, err := placeOf(all[i])
		if err != nil {
			return 0, err
		}
		if at.ID == c.ID {
			return i + 1, nil
		}
		if at.At > c.At {
			later = i
		}
	}
	return later, nil
}

// resource finds a resource of the session of the request.
func (s *server) resource(ctx context.Context, c *call, id string) (store.Session, api.Resource, error) {
	x, all, err := s.resources(ctx, c)
	if err != nil {
		return x, api.Resource{}, err
	}
	for _, raw := range all {
		var r api.Resource
		if err := api.Decode(raw, &r); err != nil {
			return x, r, fmt.Errorf("read resources of session %s: %w", x.ID, internal(err))
		}
		if r.ID == id {
			return x, r, nil
		}
	}
	return x, api.Resource{}, api.Missing("session resource", id)
}

func (s *server) getResource(ctx context.Context, c *call) (any, error) {
	_, r, err := s.resource(ctx, c, c.id("resource"))
	return r, err
}

// addResource adds a file to a session; it is put into the machine before the
// next call runs there.
//
//  1. the session's copy of the file. A crash here leaves a copy that no resource
//     names; it goes with the session.
//  2. the session's configuration names it, with audit row and idempotency record
func (s *server) addResource(ctx context.Context, c *call) (any, error) {
	x, err := s.session(ctx, c)
	if err != nil {
		return nil, err
	}
	var req api.ResourceParams
	if err := api.Decode(c.body, &req); err != nil {
		return nil, err
	}
	if req.Type != api.ResourceFile {
		return nil, api.Invalid("type", "only files can be added to a session that exists; name others when it is created")
	}
	if err := req.Validate(); err != nil {
		return nil, err
	}
	f, err := s.fileByID(ctx, c, req.FileID)
	if err != nil {
		return nil, err
	}
	now := s.db.Now()
	r, err := req.Resolve(store.NewID("sesrsc_", now), store.NewID("file_", now), api.At(now))
	if err != nil {
		return nil, err
	}
	change, err := putting(r)
	if err != nil {
		return nil, err
	}
	if err := s.sessions.CheckResources(x, change); err != nil {
		return nil, err
	}
	if _, err := s.db.CopyFile(ctx, c.caller.ws(), x.ID, store.FileCopy{From: f.ID, To: store.FileID(r.FileID)}); err != nil {
		return nil, missingFile(err, req.FileID)
	}
	c.keeps(func(any) (any, error) { return created{r.ID}, nil })
	if _, err := s.sessions.Update(ctx, c.caller.ws(), x.ID, session.UpdateParams{Resources: change}); err != nil {
		s.dropCopy(ctx, c, r, err)
		return nil, missing(err, "session", string(x.ID))
	}
	return r, nil
}

// dropCopy removes the copy of a resource that was refused. Of a write whose
// outcome is not known the copy may be named: it stays.
func (s *server) dropCopy(ctx context.Context, c *call, r api.Resource, why error) {
	for _, refused := range []error{session.ErrState, session.ErrInput, store.ErrTerminated, store.ErrNotFound, store.ErrRepeated} {
		if errors.Is(why, refused) {
			if err := s.db.DropCopy(context.WithoutCancel(ctx), c.caller.ws(), store.FileID(r.FileID)); err != nil {
				s.log.Warn("left a copy of a file", "request", c.request, "err", err)
			}
			return
		}
	}
}

// addedResource answers an addition that was done before.
func (s *server) addedResource(ctx context.Context, c *call) (any, error) {
	id, err := c.keptID()
	if err != nil {
		return nil, err
	}
	_, r, err := s.resource(ctx, c, id)
	return r, err
}

func putting(r api.Resource) (*session.ResourceChange, error) {
	raw, err := api.Encode(r)
	return &session.ResourceChange{ID: r.ID, Put: raw}, err
}

// updateResource replaces the token of a repository.
//
//  1. the sealed token. A crash here leaves the new token in use and the
//     resource's updated_at as it was.
//  2. the session's configuration, with audit row and idempotency record
func (s *server) updateResource(ctx context.Context, c *call) (any, error) {
	x, r, err := s.resource(ctx, c, c.id("resource"))
	if err != nil {
		return nil, err
	}
	if r.Type != api.ResourceRepository {
		return nil, api.Invalid("", "only the token of a github_repository can be changed; delete this resource and add another one")
	}
	var req api.ResourceUpdate
	if err := api.Decode(c.body, &req); err != nil {
		return nil, err
	}
	if err := req.Validate(); err != nil {
		return nil, err
	}
	r.UpdatedAt = api.At(s.db.Now())
	change, err := putting(r)
	if err != nil {
		return nil, err
	}
	change.Replace = true
	if err := s.sessions.CheckResources(x, change); err != nil {
		return nil, err
	}
	secret, err := s.sealToken(c, r.ID, req.AuthorizationToken)
	if err != nil {
		return nil, err
	}
	if err := s.db.PutResourceSecret(ctx, c.caller.ws(), x.ID, secret); err != nil {
		return nil, missing(err, "session", string(x.ID))
	}
	if _, err := s.sessions.Update(ctx, c.caller.ws(), x.ID, session.UpdateParams{Resources: change}); err != nil {
		if _, _, gone := s.resource(ctx, c, r.ID); isMissing(gone) { // deleted meanwhile: its token goes too
			if err := s.db.DeleteResourceSecret(context.WithoutCancel(ctx), c.caller.ws(), x.ID, r.ID); err != nil {
				s.log.Warn("left the token of a deleted resource", "request", c.request, "err", err)
			}
		}
		return nil, missing(err, "session", string(x.ID))
	}
	return r, nil
}

func isMissing(err error) bool {
	var e *api.Error
	return errors.As(err, &e) && e.Type == api.ErrNotFound
}

// deleteResource removes a resource from the session's list. What is in the
// machine stays there, and the session's copy of a file stays a file until it or
// the session is deleted. A crash between the two steps leaves a token that
// nothing names; it goes with the session.
func (s *server) deleteResource(ctx context.Context, c *call) (any, error) {
	x, r, err := s.resource(ctx, c, c.id("resource"))
	if err != nil {
		return nil, err
	}
	change := session.UpdateParams{Resources: &session.ResourceChange{ID: r.ID}}
	if _, err := s.sessions.Update(ctx, c.caller.ws(), x.ID, change); err != nil {
		return nil, missing(err, "session", string(x.ID))
	}
	if r.Type == api.ResourceRepository {
		if err := s.db.DeleteResourceSecret(ctx, c.caller.ws(), x.ID, r.ID); err != nil {
			return nil, err
		}
	}
	return api.Deleted{ID: r.ID, Type: api.DeletedResource}, nil
}
