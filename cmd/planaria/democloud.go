package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// A ledger line says what a cloud made of one request that arrived at it.
type ledgerLine struct {
	N    int             `json:"n"` // from 1 in each act
	Act  int             `json:"act"`
	At   time.Time       `json:"at"`
	Tool string          `json:"tool"`
	Args json.RawMessage `json:"arguments"`
	Key  string          `json:"key,omitempty"` // client_token, when one came
	Did  string          `json:"did"`           // "done", "read", "refused", or "same key": an earlier call did it
	// Of is the line that did it, when Did is "same key".
	Of int `json:"of,omitempty"`
}

// What a ledger line says was done.
const (
	didIt      = "done"
	didRead    = "read"
	didRefuse  = "refused"
	didSameKey = "same key"
)

// cloud is one of the demo's two outside worlds: a real MCP server on a
// loopback listener with a state of its own, which writes down everything that
// it was asked. It lives in the demo's process and so survives the server.
type cloud struct {
	name string
	url  string
	file *os.File // the ledger on disk, one JSON object a line

	mu     sync.Mutex
	act    int
	things map[string]thing
	ledger []ledgerLine
	keys   map[string]remembered // tool and client_token -> what was answered
	hold   *hold
	server *http.Server
}

// thing is an object that a cloud keeps, by its id.
type thing map[string]any

// remembered is an answer under an idempotency key.
type remembered struct {
	line   int
	answer thing
}

// hold makes a cloud do what it is asked and then keep its answer back.
type hold struct {
	tool    string
	arrived chan struct{} // closed when the call was executed
	release chan struct{} // closed when the answer may go
}

// listenCloud starts a cloud on a free loopback port.
func listenCloud(name, ledgerFile string) (*cloud, error) {
	f, err := os.OpenFile(ledgerFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open ledger of %s: %w", name, err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, errors.Join(fmt.Errorf("listen for %s: %w", name, err), f.Close())
	}
	c := &cloud{name: name, url: "http://" + l.Addr().String() + "/mcp", file: f}
	c.reset(1)
	s := mcp.NewServer(&mcp.Implementation{Name: name, Version: "1.0.0"}, nil)
	if name == oldCloud {
		c.addOldTools(s)
	} else {
		c.addNewTools(s)
	}
	mux := http.NewServeMux()
	mux.Handle("/mcp", mcp.NewStreamableHTTPHandler(func(*http.Request) *mcp.Server { return s },
		&mcp.StreamableHTTPOptions{Stateless: true, JSONResponse: true}))
	c.server = &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	go func() { _ = c.server.Serve(l) }() // ends with close
	return c, nil
}

// close stops the cloud.
func (c *cloud) close() error { return errors.Join(c.server.Close(), c.file.Close()) }

// reset gives the cloud the state with which an act begins. The ledger of
// former acts stays.
func (c *cloud) reset(act int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.act, c.keys, c.things = act, map[string]remembered{}, map[string]thing{}
	if c.name == oldCloud {
		c.things["db-orders"] = thing{"database_id": "db-orders", "status": "available", "engine": "postgresql-15",
			"rows": 48213, "checksum": "9f2c41d7"}
	}
}

// holdAnswer makes the next call of a tool execute and then wait for release
// before it is answered.
func (c *cloud) holdAnswer(tool string) *hold {
	h := &hold{tool: tool, arrived: make(chan struct{}), release: make(chan struct{})}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.hold = h
	return h
}

// lines returns the ledger of one act.
func (c *cloud) lines(act int) []ledgerLine {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(c.ledger), func(l ledgerLine) bool { return l.Act != act })
}

// cloudTool is one tool: what it does to the cloud's things, under its lock.
type cloudTool[In any] struct {
	name, description string
	read              bool
	key               func(In) string // the idempotency key of a call; nil when the tool takes none
	run               func(In) (thing, error)
}

// addTool offers a tool; every call leaves a line in the ledger before it is answered.
func addTool[In any](c *cloud, s *mcp.Server, t cloudTool[In]) {
	mcp.AddTool(s, &mcp.Tool{Name: t.name, Description: t.description},
		func(ctx context.Context, req *mcp.CallToolRequest, in In) (*mcp.CallToolResult, thing, error) {
			out, held, err := callTool(c, t, req.Params.Arguments, in)
			if held != nil {
				close(held.arrived)
				<-held.release
			}
			return nil, out, err
		})
}

// callTool executes one call and writes it down.
func callTool[In any](c *cloud, t cloudTool[In], args json.RawMessage, in In) (thing, *hold, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	line := ledgerLine{N: 1, Act: c.act, At: time.Now().UTC(), Tool: t.name, Args: args, Did: didIt}
	for _, l := range c.ledger {
		if l.Act == c.act {
			line.N++
		}
	}
	if t.read {
		line.Did = didRead
	}
	var out thing
	var err error
	if t.key != nil {
		line.Key = t.key(in)
	}
	if seen, ok := c.keys[t.name+" "+line.Key]; ok && line.Key != "" {
		line.Did, line.Of, out = didSameKey, seen.line, seen.answer
	} else if out, err = t.run(in); err != nil {
		line.Did = didRefuse
	} else if line.Key != "" {
		c.keys[t.name+" "+line.Key] = remembered{line.N, out}
	}
	c.ledger = append(c.ledger, line)
	if werr := c.write(line); werr != nil {
		return nil, nil, werr
	}
	var held *hold
	if c.hold != nil && c.hold.tool == t.name {
		held, c.hold = c.hold, nil
	}
	return out, held, err
}

// write adds a line to the ledger on disk. The caller holds the lock.
func (c *cloud) write(l ledgerLine) error {
	data, err := json.Marshal(l)
	if err != nil {
		return fmt.Errorf("write ledger: %w", err)
	}
	if _, err := c.file.Write(append(data, '\n')); err != nil {
		return fmt.Errorf("write ledger: %w", err)
	}
	return nil
}

// get returns the thing with this id. The caller holds the lock.
func (c *cloud) get(id string) (thing, error) {
	t, ok := c.things[id]
	if !ok {
		return nil, fmt.Errorf("there is no %q at %s", id, c.name)
	}
	return copyThing(t), nil
}

// put keeps a thing under its id and returns what is shown of it. The caller
// holds the lock.
func (c *cloud) put(id string, t thing) thing {
	c.things[id] = t
	return copyThing(t)
}

func copyThing(t thing) thing {
	out := make(thing, len(t))
	for k, v := range t {
		out[k] = v
	}
	return out
}

// The arguments of the clouds' tools.
type (
	databaseArgs struct {
		DatabaseID string `json:"database_id" jsonschema:"id of the database"`
	}
	deleteDatabaseArgs struct {
		DatabaseID string `json:"database_id" jsonschema:"id of the database"`
		Reference  string `json:"reference,omitempty" jsonschema:"free text for the audit trail"`
	}
	snapshotArgs struct {
		DatabaseID string `json:"database_id" jsonschema:"id of the database"`
		Name       string `json:"name" jsonschema:"name of the snapshot, unique"`
	}
	namedArgs struct {
		Name string `json:"name" jsonschema:"name of the snapshot"`
	}
	exportArgs struct {
		Snapshot    string `json:"snapshot" jsonschema:"name of the snapshot"`
		ClientToken string `json:"client_token,omitempty" jsonschema:"makes a repeated call harmless"`
	}
	networkArgs struct {
		Name        string `json:"name" jsonschema:"name of the network"`
		CIDR        string `json:"cidr" jsonschema:"address range"`
		ClientToken string `json:"client_token,omitempty" jsonschema:"makes a repeated call harmless"`
	}
	subnetArgs struct {
		Network     string `json:"network" jsonschema:"name of the network"`
		Zone        string `json:"zone" jsonschema:"zone, a or b"`
		CIDR        string `json:"cidr" jsonschema:"address range"`
		ClientToken string `json:"client_token,omitempty" jsonschema:"makes a repeated call harmless"`
	}
	createDatabaseArgs struct {
		DatabaseID  string `json:"database_id" jsonschema:"id that the new database gets"`
		Network     string `json:"network" jsonschema:"name of the network"`
		Engine      string `json:"engine" jsonschema:"engine and version"`
		ClientToken string `json:"client_token,omitempty" jsonschema:"makes a repeated call harmless"`
	}
	importArgs struct {
		DatabaseID string `json:"database_id" jsonschema:"id of the database to fill"`
		Export     string `json:"export" jsonschema:"id of the export"`
		Rows       int    `json:"rows" jsonschema:"rows that the export holds"`
		Checksum   string `json:"checksum" jsonschema:"checksum of the export"`
	}
	verifyArgs struct {
		DatabaseID string `json:"database_id" jsonschema:"id of the database"`
		Rows       int    `json:"rows" jsonschema:"rows that must be there"`
		Checksum   string `json:"checksum" jsonschema:"checksum that must match"`
	}
	dnsArgs struct {
		Name   string `json:"name" jsonschema:"host name"`
		Target string `json:"target" jsonschema:"id of the database that the name leads to"`
	}
	backupArgs struct {
		DatabaseID    string `json:"database_id" jsonschema:"id of the database"`
		RetentionDays int    `json:"retention_days" jsonschema:"days to keep a backup"`
		ClientToken   string `json:"client_token,omitempty" jsonschema:"makes a repeated call harmless"`
	}
)

// addOldTools offers the tools of the cloud that is left.
func (c *cloud) addOldTools(s *mcp.Server) {
	addTool(c, s, cloudTool[databaseArgs]{name: "get_database", description: "Describe a database.", read: true,
		run: func(in databaseArgs) (thing, error) { return c.get(in.DatabaseID) }})
	addTool(c, s, cloudTool[databaseArgs]{name: "set_read_only", description: "Make a database refuse writes.",
		run: func(in databaseArgs) (thing, error) { return c.setStatus(in.DatabaseID, "read_only") }})
	addTool(c, s, cloudTool[snapshotArgs]{name: "create_snapshot", description: "Take a snapshot of a database.", run: c.createSnapshot})
	addTool(c, s, cloudTool[namedArgs]{name: "get_snapshot", description: "Describe a snapshot.", read: true,
		run: func(in namedArgs) (thing, error) { return c.get("snapshot " + in.Name) }})
	addTool(c, s, cloudTool[exportArgs]{name: "export_snapshot", description: "Export a snapshot for another cloud.",
		key: func(in exportArgs) string { return in.ClientToken }, run: c.exportSnapshot})
	addTool(c, s, cloudTool[deleteDatabaseArgs]{name: "delete_database", description: "Delete a database and all its data, for good.", run: c.deleteDatabase})
}

// addNewTools offers the tools of the cloud that is moved to.
func (c *cloud) addNewTools(s *mcp.Server) {
	addTool(c, s, cloudTool[networkArgs]{name: "create_network", description: "Create a private network.",
		key: func(in networkArgs) string { return in.ClientToken },
		run: func(in networkArgs) (thing, error) {
			return c.create("network "+in.Name, thing{"network": in.Name, "cidr": in.CIDR})
		}})
	addTool(c, s, cloudTool[subnetArgs]{name: "create_subnet", description: "Create a subnet in a network.",
		key: func(in subnetArgs) string { return in.ClientToken }, run: c.createSubnet})
	addTool(c, s, cloudTool[createDatabaseArgs]{name: "create_database", description: "Create an empty database.",
		key: func(in createDatabaseArgs) string { return in.ClientToken }, run: c.createDatabase})
	addTool(c, s, cloudTool[databaseArgs]{name: "get_database", description: "Describe a database.", read: true,
		run: func(in databaseArgs) (thing, error) { return c.get(in.DatabaseID) }})
	addTool(c, s, cloudTool[importArgs]{name: "import_database", description: "Fill an empty database from an export.", run: c.importDatabase})
	addTool(c, s, cloudTool[verifyArgs]{name: "verify_rows", description: "Compare a database with what must be in it.", read: true, run: c.verifyRows})
	addTool(c, s, cloudTool[dnsArgs]{name: "put_dns_record", description: "Lead a host name to a database.", run: c.putDNS})
	addTool(c, s, cloudTool[backupArgs]{name: "enable_backups", description: "Back a database up every night.",
		key: func(in backupArgs) string { return in.ClientToken }, run: c.enableBackups})
}

// create keeps a new thing and refuses one that is there.
func (c *cloud) create(id string, t thing) (thing, error) {
	if _, err := c.get(id); err == nil {
		return nil, fmt.Errorf("%q exists", id)
	}
	t["status"] = "available"
	return c.put(id, t), nil
}

func (c *cloud) setStatus(id, status string) (thing, error) {
	db, err := c.get(id)
	if err != nil {
		return nil, err
	}
	db["status"] = status
	return c.put(id, db), nil
}

func (c *cloud) createSnapshot(in snapshotArgs) (thing, error) {
	db, err := c.get(in.DatabaseID)
	if err != nil {
		return nil, err
	}
	return c.create("snapshot "+in.Name, thing{"snapshot": in.Name, "rows": db["rows"], "checksum": db["checksum"]})
}

func (c *cloud) exportSnapshot(in exportArgs) (thing, error) {
	snap, err := c.get("snapshot " + in.Snapshot)
	if err != nil {
		return nil, err
	}
	id := "export-" + in.Snapshot
	return c.create(id, thing{"export": id, "rows": snap["rows"], "checksum": snap["checksum"]})
}

// deleteDatabase cannot be undone, and a second call is an error: what the
// demo is about.
func (c *cloud) deleteDatabase(in deleteDatabaseArgs) (thing, error) {
	db, err := c.get(in.DatabaseID)
	if err != nil {
		return nil, err
	}
	if db["status"] == "deleted" {
		return nil, fmt.Errorf("%q is deleted already", in.DatabaseID)
	}
	return c.setStatus(in.DatabaseID, "deleted")
}

func (c *cloud) createSubnet(in subnetArgs) (thing, error) {
	if _, err := c.get("network " + in.Network); err != nil {
		return nil, err
	}
	return c.create("subnet "+in.Network+"-"+in.Zone, thing{"subnet": in.Network + "-" + in.Zone, "cidr": in.CIDR})
}

func (c *cloud) createDatabase(in createDatabaseArgs) (thing, error) {
	for _, zone := range []string{"a", "b"} {
		if _, err := c.get("subnet " + in.Network + "-" + zone); err != nil {
			return nil, err
		}
	}
	return c.create(in.DatabaseID, thing{"database_id": in.DatabaseID, "engine": in.Engine, "rows": 0})
}

func (c *cloud) importDatabase(in importArgs) (thing, error) {
	db, err := c.get(in.DatabaseID)
	if err != nil {
		return nil, err
	}
	if db["status"] == "imported" {
		return nil, fmt.Errorf("%q was filled already", in.DatabaseID)
	}
	db["status"], db["rows"], db["checksum"] = "imported", in.Rows, in.Checksum
	return c.put(in.DatabaseID, db), nil
}

func (c *cloud) verifyRows(in verifyArgs) (thing, error) {
	db, err := c.get(in.DatabaseID)
	if err != nil {
		return nil, err
	}
	same := db["rows"] == in.Rows && db["checksum"] == in.Checksum
	return thing{"database_id": in.DatabaseID, "rows": db["rows"], "checksum": db["checksum"], "matches": same}, nil
}

func (c *cloud) putDNS(in dnsArgs) (thing, error) {
	if _, err := c.get(in.Target); err != nil {
		return nil, err
	}
	return c.put("dns "+in.Name, thing{"name": in.Name, "target": in.Target}), nil
}

func (c *cloud) enableBackups(in backupArgs) (thing, error) {
	db, err := c.get(in.DatabaseID)
	if err != nil {
		return nil, err
	}
	db["backups_days"] = in.RetentionDays
	return c.put(in.DatabaseID, db), nil
}
