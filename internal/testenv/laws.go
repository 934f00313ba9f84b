package testenv

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	_ "github.com/jackc/pgx/v5/stdlib" // database/sql driver pgx
	_ "modernc.org/sqlite"             // database/sql driver sqlite

	"github.com/planaria/planaria/internal/store"
)

// Laws asserts the laws of design section 2 on a whole store, its outside
// world and everything that was said.
type Laws struct {
	DB    *store.DB
	URL   string // of the store, to look at columns that no method shows
	World *Outside
	Model *Model
	// Secrets are canaries that may be nowhere.
	Secrets []string
	// Said is what was logged, answered, printed, by what it is.
	Said map[string][]byte

	broken []string
	// of the world's acts: effects by tool and id
	effects map[[2]string][]*trail
	keys    map[string]bool
	// known remembers sessions whose log has not grown since they were sound.
	known map[store.SessionID]knownLog
	// looked counts what was searched for secrets, by what it is.
	looked map[string]int
}

type knownLog struct {
	hash   [32]byte
	owner  store.NodeID
	trails []*trail
}

// Forget makes the next Check read everything anew.
func (l *Laws) Forget() { l.known, l.looked = nil, nil }

func (l *Laws) breaks(format string, args ...any) {
	l.broken = append(l.broken, fmt.Sprintf(format, args...))
}

// Check returns every law that is broken, empty when all hold.
func (l *Laws) Check(ctx context.Context) ([]string, error) {
	l.broken, l.effects, l.keys = nil, map[[2]string][]*trail{}, map[string]bool{}
	if l.known == nil {
		l.known, l.looked = map[store.SessionID]knownLog{}, map[string]int{}
	}
	// What happened outside before the logs are read must be intended in them;
	// what they say happened must have happened by the time they were read.
	var before []Act
	if l.World != nil {
		before = l.World.Ledger()
	}
	workspaces, err := l.DB.Workspaces(ctx, store.Page{})
	if err != nil {
		return nil, err
	}
	for _, w := range workspaces {
		list, err := l.DB.Sessions(ctx, w.ID, store.SessionFilter{IncludeArchived: true})
		if err != nil {
			return nil, err
		}
		for _, s := range list {
			if err := l.session(ctx, s); err != nil {
				return nil, err
			}
		}
	}
	if l.World != nil {
		l.world(before)
	}
	if l.Model != nil {
		if st := l.Model.Stats(); st.Invalid+st.Unscripted > 0 {
			l.breaks("H1: the model got %d invalid and %d unscripted requests, last: %s", st.Invalid, st.Unscripted, st.LastError)
		}
		bodies := l.Model.Bodies()
		for _, b := range bodies[min(len(bodies), l.looked["model"]):] {
			l.secret("a model request", b)
		}
		l.looked["model"] = len(bodies)
	}
	for what, text := range l.Said {
		l.secret(what, text[max(0, min(len(text), l.looked[what])-1000):])
		l.looked[what] = len(text)
	}
	return l.broken, l.waiting(ctx)
}

// session checks one session's log.
func (l *Laws) session(ctx context.Context, s store.Session) error {
	if s.Damaged != "" {
		return nil
	}
	if k, ok := l.known[s.ID]; ok && k.hash == s.HeadHash && k.owner == s.Owner {
		l.acts(k.trails)
		return nil
	}
	// A session that is written to meanwhile is read up to the head it had.
	all, err := l.DB.Entries(ctx, s.Workspace, s.ID, store.Range{Until: s.Head})
	if err != nil {
		l.breaks("%s: its log cannot be read: %v", s.ID, err)
		return nil
	}
	if s.Head == 0 || len(all) == 0 || all[len(all)-1].Seq != s.Head || all[len(all)-1].Hash != s.HeadHash {
		l.breaks("%s: the row's head %d is not the log's end (%d entries)", s.ID, s.Head, len(all))
		return nil
	}
	t := &logCheck{Laws: l, id: s.ID, trails: map[store.EffectID]*trail{}, uses: map[string]*toolUse{}, spans: map[string]int{}}
	for _, e := range all {
		t.entry(e)
	}
	t.end(s)
	diff, err := l.DB.Rebuild(ctx, s.Workspace, s.ID)
	switch {
	case err != nil:
		l.breaks("%s: rebuild: %v", s.ID, err)
	case diff != "":
		// It may have been written to between the two readings.
		if now, err := l.DB.Session(ctx, s.Workspace, s.ID); err == nil && now.Head == s.Head && now.Owner == s.Owner {
			l.breaks("L2 %s: its rows are not what its log says: %s", s.ID, diff)
		}
	}
	inbox, err := l.DB.Inbox(ctx, s.Workspace, s.ID)
	if err != nil {
		return err
	}
	for _, r := range inbox {
		l.secret("an inbox row of "+string(s.ID), r.Body)
	}
	config, err := json.Marshal(s.Config)
	if err != nil {
		return err
	}
	l.secret("the configuration of "+string(s.ID), config)
	k := knownLog{hash: s.HeadHash, owner: s.Owner}
	for _, tr := range t.trails {
		if !tr.client && !strings.HasPrefix(tr.tool, "model:") {
			k.trails = append(k.trails, tr)
		}
	}
	l.acts(k.trails)
	if len(l.broken) == 0 {
		l.known[s.ID] = k
	}
	return nil
}

// acts gathers a session's effects outside.
func (l *Laws) acts(trails []*trail) {
	for _, tr := range trails {
		act := [2]string{tr.tool, tr.arg}
		l.effects[act] = append(l.effects[act], tr)
		if tr.key != "" {
			l.keys[tr.key] = true
		}
	}
}

// secret looks for canaries, plain and in base64.
func (l *Laws) secret(where string, text []byte) {
	for _, s := range l.Secrets {
		for _, form := range []string{s, base64.StdEncoding.EncodeToString([]byte(s)), base64.RawURLEncoding.EncodeToString([]byte(s))} {
			if i := bytes.Index(text, []byte(form)); i >= 0 {
				l.breaks("L6: %s holds a secret: …%s", where, text[max(0, i-80):min(len(text), i+20)])
			}
		}
	}
}

// world compares the ledger outside with the effects that are on record.
func (l *Laws) world(before []Act) {
	done := map[[2]string]int{}
	for _, a := range before {
		if a.Did != "done" {
			continue
		}
		done[[2]string{a.Tool, a.ID}]++
		if a.Key != "" && !l.keys[a.Key] {
			l.breaks("L1: %s %s came with key %s, which no intent holds", a.Tool, a.ID, a.Key)
		}
	}
	for act, n := range done {
		tool, _ := toolNamed(act[0])
		may := 0
		var states []string
		for _, tr := range l.effects[act] {
			if tr.mayHaveHappened() {
				may++
			}
			states = append(states, tr.String())
		}
		if may == 0 {
			l.breaks("L1: %s %s happened %d times outside and the log says %v", act[0], act[1], n, states)
		}
		if n > may && may > 0 && tool.Name != "set" { // the natural one may be sent again
			l.breaks("L3: %s %s happened %d times outside for %d effects: %v", act[0], act[1], n, may, states)
		}
	}
	clear(done)
	for _, a := range l.World.Ledger() {
		if a.Did == "done" {
			done[[2]string{a.Tool, a.ID}]++
		}
	}
	for act, trails := range l.effects {
		tool, known := toolNamed(act[0])
		if !known || tool.Class == "read" {
			continue
		}
		sure := 0
		for _, tr := range trails {
			if tr.happened {
				sure++
			}
		}
		if sure > done[act] && tool.Name != "set" || sure > 0 && done[act] == 0 {
			l.breaks("L4: the log says that %s %s happened %d times, outside it happened %d times", act[0], act[1], sure, done[act])
		}
	}
}

// waiting asserts L7: what is not at rest has an owner or a time to wake.
func (l *Laws) waiting(ctx context.Context) error {
	driver, dsn := "pgx", l.URL
	if file, ok := strings.CutPrefix(l.URL, "sqlite:"); ok {
		driver, dsn = "sqlite", "file:"+file+"?mode=ro&_pragma=busy_timeout(10000)"
	}
	db, err := sql.Open(driver, dsn)
	if err != nil {
		return err
	}
	defer db.Close()
	rows, err := db.QueryContext(ctx, `SELECT id, status FROM sessions WHERE deleted_at = 0 AND damaged = '' AND owner = '' AND next_at = 0
		AND (status IN ('running', 'rescheduling') OR starting = 1 AND paused = 0)`)
	if err != nil {
		return fmt.Errorf("look for stuck sessions: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		var id, status string
		if err := rows.Scan(&id, &status); err != nil {
			return err
		}
		l.breaks("L7: %s is %s without owner and without a time to wake", id, status)
	}
	return rows.Err()
}

// trail is what the log says of one effect.
type trail struct {
	id           store.EffectID
	session      store.SessionID
	tool, arg    string
	class        store.Class
	client       bool
	key          string
	intents      int
	attempts     int
	attemptFence store.Fence
	completions  int
	state        store.EffectState
	outcome      store.Outcome
	happened     bool
}

func (t *trail) String() string {
	return fmt.Sprintf("%s %s %s", t.id, t.state, t.outcome)
}

func (t *trail) ended() bool {
	return t.state == store.StateCompleted || t.state == store.StateVoid || t.state == store.StateDenied
}

// mayHaveHappened: the log does not exclude that it happened.
func (t *trail) mayHaveHappened() bool {
	switch t.state {
	case store.StateCompleted:
		return t.outcome == store.OutcomeOK
	case store.StateAttempted, store.StateInDoubt:
		return true
	case store.StateIntended:
		return t.class == store.ClassIdempotent || t.class == store.ClassRead
	}
	return false
}

type toolUse struct {
	custom  bool
	results int
	client  int
}

// logCheck walks one log.
type logCheck struct {
	*Laws
	id     store.SessionID
	last   store.Entry
	idle   bool // the last status event was idle
	paused bool
	events []store.Entry
	trails map[store.EffectID]*trail
	uses   map[string]*toolUse
	spans  map[string]int
	stop   Stop
}

func (c *logCheck) entry(e store.Entry) {
	if e.Seq != c.last.Seq+1 {
		c.breaks("%s: seq %d follows %d", c.id, e.Seq, c.last.Seq)
	}
	if !e.At.After(c.last.At) {
		c.breaks("%s: seq %d is not later than the one before it", c.id, e.Seq)
	}
	if e.Fence < c.last.Fence || e.Fence > c.last.Fence && e.Kind != store.KindClaim {
		c.breaks("L5 %s: seq %d (%s) has fence %d behind %d", c.id, e.Seq, e.Kind, e.Fence, c.last.Fence)
	}
	c.last = e
	c.secret(fmt.Sprintf("entry %d (%s %s) of %s", e.Seq, e.Kind, e.Type, c.id), e.Body)
	if e.Kind == store.KindEvent {
		c.event(e)
		return
	}
	c.record(e)
}

// record follows the states of design section 4.
func (c *logCheck) record(e store.Entry) {
	bad := func(what string) { c.breaks("%s: seq %d, %s of %s: %s", c.id, e.Seq, e.Kind, e.ID, what) }
	read := func(v any) bool {
		if err := json.Unmarshal(e.Body, v); err != nil {
			bad(err.Error())
			return false
		}
		return true
	}
	t := c.trails[store.EffectID(e.ID)]
	switch e.Kind {
	case store.KindProposal, store.KindIntent, store.KindAttempt, store.KindDoubt, store.KindCompletion, store.KindSettlement:
		if t == nil && e.Kind != store.KindProposal && e.Kind != store.KindIntent {
			bad("there is no intent")
			return
		}
		if t != nil && t.ended() {
			bad("it had ended as " + t.String())
		}
	case store.KindOutput:
		if t == nil && len(e.ID) > 0 {
			bad("L1: a model answered without an intent")
			return
		}
		if t != nil {
			if t.ended() {
				bad("it was answered before")
			}
			t.state, t.completions = store.StateCompleted, t.completions+1
		}
		return
	}
	switch e.Kind {
	case store.KindProposal:
		var b store.Proposal
		if read(&b) {
			if t == nil {
				t = c.known(b.EffectHeader)
			}
			t.state = b.State
		}
	case store.KindIntent:
		var b store.Intent
		if !read(&b) {
			return
		}
		if t == nil {
			t = c.known(b.EffectHeader)
		} else if t.state != store.StateAwaitingApproval {
			bad("its state was " + string(t.state))
		} else if b.Approved == "" {
			bad("A1: it waited for an approval and none was burnt")
		}
		t.intents++
		t.state, t.key, t.client = store.StateIntended, b.Key, b.Client
	case store.KindAttempt:
		var b store.Attempt
		if !read(&b) {
			return
		}
		t.attempts++
		if t.state != store.StateIntended || b.N != t.attempts || t.attempts > 1 {
			bad(fmt.Sprintf("L3: attempt %d in state %s", b.N, t.state))
		}
		if t.class != store.ClassIrreversible && t.class != store.ClassMixed || t.client {
			bad("an attempt of class " + string(t.class))
		}
		t.state, t.attemptFence = store.StateAttempted, e.Fence
	case store.KindDoubt:
		if t.state != store.StateAttempted && !(t.state == store.StateIntended && (t.client || t.class == store.ClassIdempotent)) {
			bad("its state was " + string(t.state))
		}
		t.state = store.StateInDoubt
	case store.KindCompletion:
		c.completion(e, t, bad, read)
	case store.KindEvidence:
		var b store.Evidence
		if read(&b) && b.Contradicts {
			bad("L4: evidence contradicts what was settled: " + b.Says + " " + b.Detail)
		}
	case store.KindSettlement:
		var b store.Settlement
		if !read(&b) {
			return
		}
		switch {
		case b.Outcome == store.Told && t.state == store.StateInDoubt:
		case b.Outcome == "happened" && t.state == store.StateInDoubt:
			t.state, t.outcome, t.happened = store.StateCompleted, store.OutcomeOK, true
		case b.Outcome == "did_not_happen" && (t.state == store.StateInDoubt || t.state == store.StateIntended):
			t.state = store.StateVoid
		default:
			bad("settled as " + b.Outcome + " in state " + string(t.state))
		}
	}
}

func (c *logCheck) known(h store.EffectHeader) *trail {
	var a struct {
		ID string `json:"id"`
	}
	_ = json.Unmarshal(h.Arguments, &a) // arguments without an id are nobody's here
	t := &trail{id: h.Effect, session: c.id, tool: h.Tool, arg: a.ID, class: h.Class}
	c.trails[h.Effect] = t
	return t
}

func (c *logCheck) completion(e store.Entry, t *trail, bad func(string), read func(any) bool) {
	var b store.Completion
	if !read(&b) {
		return
	}
	t.completions++
	if t.completions > 1 {
		bad("L3: a second completion")
	}
	if !t.client && (t.class == store.ClassIrreversible || t.class == store.ClassMixed) {
		if t.state != store.StateAttempted || b.N != t.attempts {
			bad(fmt.Sprintf("L1: completion of attempt %d in state %s", b.N, t.state))
		}
		if t.attemptFence != e.Fence {
			bad(fmt.Sprintf("L5: attempted under fence %d, completed under %d", t.attemptFence, e.Fence))
		}
	} else if t.state != store.StateIntended && !(t.class == store.ClassIdempotent && t.state == store.StateInDoubt) {
		bad("completion in state " + string(t.state))
	}
	t.state, t.outcome = store.StateCompleted, b.Outcome
	t.happened = b.Outcome == store.OutcomeOK && t.class != store.ClassRead && !t.client
}

// afterIdle are the events that may follow an idle before the next running
// (reference section 9.11): input, and what ends or changes the session.
var afterIdle = []string{"session.status_running", "session.updated", "session.thread_status_terminated", "session.status_terminated"}

// afterQuestion may follow too when the session waits for answers or is paused
// with calls open: a denial or an interrupt closes calls, and idle is said anew
// for what is left.
var afterQuestion = []string{"agent.tool_result", "agent.mcp_tool_result", "session.thread_status_idle", "session.usage", "session.status_idle",
	"session.paused", "session.resumed"}

func (c *logCheck) event(e store.Entry) {
	var b struct {
		Tool   string `json:"tool_use_id"`
		MCP    string `json:"mcp_tool_use_id"`
		Custom string `json:"custom_tool_use_id"`
		Start  string `json:"model_request_start_id"`
		Stop   Stop   `json:"stop_reason"`
	}
	if err := json.Unmarshal(e.Body, &b); err != nil {
		c.breaks("%s: seq %d: %v", c.id, e.Seq, err)
		return
	}
	allowed := slices.Contains(afterIdle, e.Type) || strings.HasPrefix(e.Type, "user.") || e.Type == "system.message" ||
		(c.stop.Type == "requires_action" || c.paused) && slices.Contains(afterQuestion, e.Type)
	if c.idle && !allowed {
		c.breaks("%s: seq %d: %s stands behind session.status_idle", c.id, e.Seq, e.Type)
	}
	before := func(n int) string {
		if len(c.events) < n {
			return ""
		}
		return c.events[len(c.events)-n].Type
	}
	if before(1) == "session.status_running" && e.Type != "session.thread_status_running" {
		c.breaks("%s: seq %d: %s right behind session.status_running", c.id, e.Seq, e.Type)
	}
	switch e.Type {
	case "session.status_running":
		c.idle = false
	case "session.paused":
		c.paused = true
	case "session.resumed":
		c.paused = false
	case "session.status_idle":
		if before(1) != "session.usage" || before(2) != "session.thread_status_idle" {
			c.breaks("%s: seq %d: session.status_idle stands behind %s, %s", c.id, e.Seq, before(2), before(1))
		}
		c.idle, c.stop = true, b.Stop
	case "agent.tool_use", "agent.mcp_tool_use", "agent.custom_tool_use":
		c.uses[e.ID] = &toolUse{custom: e.Type == "agent.custom_tool_use"}
	case "agent.tool_result":
		c.result(e, b.Tool, false)
	case "agent.mcp_tool_result":
		c.result(e, b.MCP, false)
	case "user.custom_tool_result":
		c.result(e, b.Custom, true)
	case "span.model_request_start":
		c.spans[e.ID] = 0
	case "span.model_request_end":
		if n, ok := c.spans[b.Start]; !ok || n > 0 {
			c.breaks("%s: seq %d ends span %q, which is not open", c.id, e.Seq, b.Start)
		}
		c.spans[b.Start]++
	}
	c.events = append(c.events, e)
}

func (c *logCheck) result(e store.Entry, use string, client bool) {
	u := c.uses[use]
	if u == nil {
		c.breaks("H1 %s: seq %d: a result for %q, which was not called", c.id, e.Seq, use)
		return
	}
	if client {
		u.client++
	} else {
		u.results++
	}
	// An answer that was accepted before an interrupt closed its call is logged too.
	if u.results > 1 || u.client > 1 || u.results+u.client > 1 && !u.custom {
		c.breaks("H1 %s: seq %d: a second result for %s", c.id, e.Seq, use)
	}
}

// end checks what must hold once the session rests.
func (c *logCheck) end(s store.Session) {
	if !c.idle || s.Paused || c.stop.Type != "end_turn" {
		return
	}
	for use, u := range c.uses {
		if u.results+u.client == 0 {
			c.breaks("H1 %s: rests with end_turn and %s has no result", c.id, use)
		}
	}
	for span, n := range c.spans {
		if n == 0 {
			c.breaks("%s: rests and span %s is open", c.id, span)
		}
	}
}
