// Package store keeps what must survive: one append-only log per session, the
// rows derived from it, the inbox of what came from outside, owners and their
// fences, and the configuration objects. It runs on SQLite (one folder, one
// process) and on PostgreSQL (many processes) under one contract, proved by one
// suite. It knows nothing of models, tools or HTTP, and sends nothing anywhere.
//
// # The log
//
// Entries of a session have a dense seq from 1. An entry's hash is
//
//	SHA-256(previous hash ‖ length-prefixed header ‖ SHA-256(salt ‖ body))
//
// so the log proves itself, and erasing a body (and its salt) leaves a digest
// with which the chain still verifies. Bodies are sealed with AES-256-GCM under
// the data key of the session's lineage, bound to workspace, session and seq;
// the key is wrapped by Config.Master. A body over MaxInlineBody is sealed into
// Config.Blobs before the transaction, and the row names it.
//
// # Rows that follow from the log
//
// fold (project.go) is one pure function: old rows and an entry give new rows.
// The committer writes what it says, Rebuild compares with what it says. It
// refuses illegal transitions of effects with ErrConflict:
//
//	proposed -> denied
//	         -> awaiting_approval -> denied
//	         -> intended -> attempted -> completed
//	                                  -> in_doubt -> completed | void
//	            intended -> completed          read, idempotent, client's, replayed
//	            intended -> in_doubt           idempotent, window over
//	            intended -> void               proved unsent
//
// Not in the log, and so not rebuilt: owner and fence, inbox and answers, and
// the flag that input which starts a turn was accepted (a session's effective
// status, see Delivery.Starts).
//
// # Files
//
// A file's bytes are sealed in chunks under a data key of their own and streamed
// into the blob store (content.go); its name and type are sealed in its row. A
// copy for a session is a row that names the same content. A content goes with
// its last row: the key is destroyed in that transaction, the blob after it.
//
//	step                                  crash right behind it
//	1 the content is in Blobs             a blob whose key nobody has
//	2 row and wrapped key commit          the file is there
//	3 deletion commits, key destroyed     a blob that nobody can open
//
// The tokens of a session's repositories are kept in resource_secrets as
// vault.Master.Seal sealed them under (workspace, resource id); keeper opens them
// with vault.Master.Open under the same two names, and nothing else does.
//
// # Who may write
//
// Claim makes a node the owner: fence + 1 and a claim entry in one transaction.
// Each append of an owner compares owner, fence and head in its transaction; a
// newer owner makes it ErrFenced. Outsiders use Deliver (the inbox; no fence) or
// AppendUnowned (claim, append and release in one transaction).
//
// On SQLite the lock on the data folder makes its holder the only node. On
// PostgreSQL a node has a lease by the database's clock (LeaseTTL, renewed every
// LeaseRenew) and an advisory lock on a connection of its own. Others bury it,
// which frees its sessions, when the lock is free (killed: within PollEvery) or
// the lease is over (stopped, cut off). It trusts itself only until LeaseMargin
// before the lease ends, counted from before the renewing request, and ends all
// its leases when it cannot renew or its lock's connection breaks.
//
// A session is claimable when it has no owner and next_at is reached: an unread
// inbox row (of a paused session: an urgent one), a status other than rest, or
// the time of a wait entry.
//
// # Write order, and what a crash leaves
//
//	step                                  crash right behind it
//	1 large bodies are in Blobs           blobs that no row names; harmless
//	2 rows of a batch are written         nothing: the transaction is not there
//	3 COMMIT                              the entries are there; the successor of
//	                                      the owner reads them
//	4 witness notes heads (SQLite)        the witness lags; it never leads
//	5 OnCommit, followers, Append's       nothing is lost: they read the log
//	  callers are told
//	6 other nodes are notified            they poll every PollEvery
//
// The committer gathers the appends of all leases while the last transaction
// syncs. Before a session's rows are written only reads have happened for it, so
// one that fails a precondition fails alone. A statement that fails takes the
// batch with it, which is then written session by session. When COMMIT itself
// gives an error, head and hash of each session are compared: ours, committed;
// the former, written again; another, ErrFenced. If that cannot be read, the
// append is ErrUnknown and the lease is over; the node's next Claim frees the
// session, and its next owner reads what is there.
//
// # Damage
//
// An entry that does not match its hash, a body that does not open, a missing
// row: ErrDamaged for that session, wherever it is. Refuse marks it, it stays
// listed with its reason, is never claimed, and can be deleted. On SQLite the
// file witness beside the database tells at the next start which sessions have
// less than was acknowledged (a torn file, a file of yesterday); those are
// refused by name. A database that is missing, empty or unreadable in a folder
// that was initialised is refused as a whole and never made anew.
package store
