// Package effect is the write-ahead protocol for acts on the world outside: it
// makes the records, checks what must hold before each, and says what an
// answer proves. It dials nothing (keeper does) and decides nothing about
// permission (gateway does).
//
// # States
//
//	proposed -> denied
//	         -> awaiting_approval -> denied
//	         -> intended -> attempted -> completed (outcome ok | refused)
//	                                  -> in_doubt -> completed | void
//	            intended -> void (proved unsent, no longer wanted)
//
// Classes read and idempotent have no attempt: they go from intended to
// completed, an idempotent one also to in_doubt.
//
// # Write order
//
// For one call, each line durable before the next begins:
//
//  1. intent      one append with the model output that asks for it
//  2. attempt     irreversible and mixed; by the sender itself, under its fence
//  3. (the ticket is spent, the request leaves, the answer comes)
//  4. completion  one append with the tool result event; or doubt
//
// # What a crash leaves, and who repairs it
//
//	after  the log shows       the next owner's Continue
//	-      nothing             the model is asked again
//	1      intended            irreversible: proved unsent, checked again, then
//	                           attempted; idempotent: may have left, sent again
//	                           under its key inside the window; read: runs again
//	2      attempted           in doubt: evidence, probe, person; never sent again
//	3      attempted           the same: nobody can tell it from the former
//	4      completed           nothing: the result is there with it
//
// An append whose commit is lost (store.ErrUnknown) may or may not be there.
// The sender does not send on a lost attempt, and hands what it learnt on a
// lost completion to the inbox as evidence, which is harmless if it was there.
//
// # The ticket
//
// Attempt returns a Ticket, which allows one send until send_by: two seconds
// after the commit began, and before the node's lease may end, on a clock that
// counts suspension. It is spent right before the first byte. A process that
// was stopped in between finds it too late, and its call is refused: nothing
// left. So an owner that takes over after the lease can know that what it sees
// as attempted has either left before or never will.
//
// # Settling
//
// An effect in doubt is settled by, in this order: evidence (a late answer from
// a sender that lost its fence), the contract's probe, a resend under the same
// key inside the target's window (idempotent), a person. See package gateway.
package effect
