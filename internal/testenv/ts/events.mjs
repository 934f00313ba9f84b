// Events: send, list, stream with previews, and everything that waits for a
// client (reference sections 9 and 10).
import { agentParams, all, assert, check, client, collect, environment, fails, idle, ids, isNew, message, requests, turn, types } from './lib.mjs';

const agent = await client.beta.agents.create(agentParams('events'));
const env = await environment();
const vault = process.env.VAULT;
const newSession = () => client.beta.sessions.create({ agent: agent.id, environment_id: env.id, vault_ids: [vault] });

const isPreview = (ev) => ev.type === 'event_start' || ev.type === 'event_delta';

// settled keeps the last showing of each event: a client event shows when it
// is queued and again, under the same id, when it is processed.
function settled(seen) {
  const byID = new Map();
  for (const ev of seen) {
    if (isPreview(ev)) continue;
    byID.delete(ev.id);
    byID.set(ev.id, ev);
  }
  return [...byID.values()];
}

// listed compares a stream with the list (law L10) and checks what must hold
// of every log.
async function listed(session, seen) {
  const log = await all(client.beta.sessions.events.list(session, { limit: 3 }));
  if (seen) {
    const shown = settled(seen);
    assert.deepEqual(ids(log).slice(-shown.length), ids(shown));
    for (const ev of shown) assert.deepEqual({ ...log.find((e) => e.id === ev.id) }, { ...ev });
  }
  for (let i = 1; i < log.length; i++) {
    assert.ok(log[i - 1].processed_at < log[i].processed_at, 'processed_at does not grow');
  }
  assert.equal(new Set(ids(log)).size, log.length);
  return log;
}

await check('a turn with previews', async () => {
  const s = await newSession();
  const { sent, seen } = await turn(s.id, [message('[long] tell me')], 'end_turn',
    { event_deltas: ['agent.message', 'agent.thinking'] });
  assert.equal(sent.length, 1);
  assert.match(sent[0].id, /^sevt_/);
  assert.equal(sent[0].processed_at, null);
  assert.deepEqual(types(settled(seen)), [
    'session.status_running', 'session.thread_status_running', 'user.message', 'span.model_request_start',
    'agent.thinking', 'agent.message', 'span.model_request_end',
    'session.thread_status_idle', 'session.usage', 'session.status_idle',
  ]);
  assert.equal(settled(seen)[2].id, sent[0].id);
  const final = seen.find((ev) => ev.type === 'agent.message');
  const start = seen.find((ev) => ev.type === 'event_start' && ev.event.type === 'agent.message');
  assert.equal(start.event.id, final.id);
  const text = seen.filter((ev) => ev.type === 'event_delta' && ev.event_id === final.id)
    .map((ev) => ev.delta.content.text).join('');
  assert.ok(text.length > 0 && final.content[0].text.startsWith(text), 'previews are no prefix of the message');
  assert.equal(seen.find((ev) => ev.type === 'session.status_idle').stop_details, null);
  const end = seen.find((ev) => ev.type === 'span.model_request_end');
  assert.equal(end.is_error, false);
  assert.ok(end.model_usage.input_tokens > 0);
  await listed(s.id, seen);
});

await check('lists filter and turn around', async () => {
  const s = await newSession();
  await turn(s.id, [message('[hello] list')], 'end_turn');
  const log = await listed(s.id);
  const down = await all(client.beta.sessions.events.list(s.id, { order: 'desc', limit: 2 }));
  assert.deepEqual(ids(down), ids(log).reverse());
  const some = await all(client.beta.sessions.events.list(s.id, { types: ['agent.message', 'user.message'] }));
  assert.deepEqual(types(some), ['user.message', 'agent.message']);
  const late = await all(client.beta.sessions.events.list(s.id, { 'created_at[gt]': log[2].processed_at }));
  assert.deepEqual(ids(late), ids(log).slice(3));
});

await check('an allowed MCP call', async () => {
  const s = await newSession();
  const { seen } = await turn(s.id, [message('[look] at it')], 'end_turn');
  const use = seen.find((ev) => ev.type === 'agent.mcp_tool_use');
  assert.equal(use.mcp_server_name, 'outside');
  assert.equal(use.name, 'look');
  assert.equal(use.evaluated_permission, 'allow');
  const result = seen.find((ev) => ev.type === 'agent.mcp_tool_result');
  assert.equal(result.mcp_tool_use_id, use.id);
  assert.ok(!result.is_error, JSON.stringify(result.content));
  await listed(s.id, seen);
});

await check('a confirmation allows', async () => {
  const s = await newSession();
  const asked = await turn(s.id, [message(`[pay] ${s.id}`)], 'requires_action');
  const use = asked.seen.find((ev) => ev.type === 'agent.mcp_tool_use');
  assert.equal(use.evaluated_permission, 'ask');
  assert.deepEqual(asked.seen.at(-1).stop_reason.event_ids, [use.id]);
  const done = await turn(s.id, [{ type: 'user.tool_confirmation', tool_use_id: use.id, result: 'allow' }], 'end_turn');
  const result = done.seen.find((ev) => ev.type === 'agent.mcp_tool_result');
  assert.equal(result.mcp_tool_use_id, use.id);
  assert.ok(!result.is_error, JSON.stringify(result.content));
  const effects = await client.get(`/v1/sessions/${s.id}/effects`, { query: { class: 'irreversible' } });
  assert.equal(effects.data.length, 1);
  assert.equal(effects.data[0].state, 'completed');
  assert.equal(effects.data[0].outcome, 'ok');
  assert.equal(effects.data[0].attempts.length, 1);
  const again = { type: 'user.tool_confirmation', tool_use_id: use.id, result: 'allow' };
  await client.beta.sessions.events.send(s.id, { events: [again] });
  await fails(client.beta.sessions.events.send(s.id, { events: [{ ...again, result: 'deny' }] }),
    'BadRequestError', 'invalid_request_error');
  await listed(s.id);
});

await check('a confirmation denies', async () => {
  const s = await newSession();
  const asked = await turn(s.id, [message(`[pay] ${s.id}`)], 'requires_action');
  const use = asked.seen.find((ev) => ev.type === 'agent.mcp_tool_use');
  const done = await turn(s.id,
    [{ type: 'user.tool_confirmation', tool_use_id: use.id, result: 'deny', deny_message: 'too dear' }], 'end_turn');
  const result = done.seen.find((ev) => ev.type === 'agent.mcp_tool_result');
  assert.equal(result.is_error, true);
  assert.match(JSON.stringify(result.content), /too dear/);
  const effects = await client.get(`/v1/sessions/${s.id}/effects`, { query: { class: 'irreversible' } });
  assert.deepEqual(effects.data.map((e) => e.state), ['denied']);
});

await check('a custom tool is answered by the client', async () => {
  const s = await newSession();
  const asked = await turn(s.id, [message('[weigh] apple')], 'requires_action');
  const use = asked.seen.find((ev) => ev.type === 'agent.custom_tool_use');
  assert.equal(use.name, 'weigh');
  assert.deepEqual(use.input, { thing: '[weigh] apple' });
  const { sent, seen } = await turn(s.id, [{
    type: 'user.custom_tool_result', custom_tool_use_id: use.id, content: [{ type: 'text', text: '{"grams":150}' }],
  }], 'end_turn');
  assert.ok(sent[0].processed_at, 'a tool result is echoed as processed');
  assert.match(seen.find((ev) => ev.type === 'agent.message').content[0].text, /150/);
  await fails(client.beta.sessions.events.send(s.id, {
    events: [{ type: 'user.custom_tool_result', custom_tool_use_id: 'sevt_nothing', content: [{ type: 'text', text: 'x' }] }],
  }), 'BadRequestError', 'invalid_request_error');
});

await check('some of the answers leave the rest waiting', async () => {
  const s = await newSession();
  const asked = await turn(s.id, [message('[both] things')], 'requires_action');
  const uses = asked.seen.filter((ev) => ev.type === 'agent.custom_tool_use');
  assert.equal(uses.length, 2);
  assert.deepEqual([...asked.seen.at(-1).stop_reason.event_ids].sort(), ids(uses).sort());
  const answer = (use, text) => ({ type: 'user.custom_tool_result', custom_tool_use_id: use.id, content: [{ type: 'text', text }] });
  const half = await turn(s.id, [answer(uses[0], '1')], 'requires_action');
  assert.deepEqual(half.seen.at(-1).stop_reason.event_ids, [uses[1].id]);
  const done = await turn(s.id, [answer(uses[1], '2')], 'end_turn');
  assert.ok(types(done.seen).includes('agent.message'));
  await listed(s.id);
});

await check('an interrupt ends the turn', async () => {
  const s = await newSession();
  const stream = await client.beta.sessions.events.stream(s.id);
  await client.beta.sessions.events.send(s.id, { events: [message('[slow] work')] });
  await collect(stream, (ev) => ev.type === 'span.model_request_start');
  const { sent, seen } = await turn(s.id, [{ type: 'user.interrupt' }], 'end_turn');
  assert.equal(sent[0].processed_at, null);
  assert.ok(seen.some((ev) => ev.type === 'user.interrupt' && ev.processed_at !== null));
  const log = await listed(s.id);
  const end = log.find((ev) => ev.type === 'span.model_request_end');
  assert.equal(end.is_error, true);
  assert.equal(log.at(-1).type, 'session.status_idle');
  assert.equal((await client.beta.sessions.retrieve(s.id)).status, 'idle');
});

await check('an interrupt closes what waits', async () => {
  const s = await newSession();
  const asked = await turn(s.id, [message(`[pay] ${s.id}`)], 'requires_action');
  const use = asked.seen.find((ev) => ev.type === 'agent.mcp_tool_use');
  const { seen } = await turn(s.id, [{ type: 'user.interrupt' }], 'end_turn');
  const result = seen.find((ev) => ev.type === 'agent.mcp_tool_result');
  assert.equal(result.mcp_tool_use_id, use.id);
  assert.equal(result.is_error, true);
  await fails(client.beta.sessions.events.send(s.id, {
    events: [{ type: 'user.tool_confirmation', tool_use_id: use.id, result: 'allow' }],
  }), 'BadRequestError', 'invalid_request_error');
});

await check('a message that comes while it runs waits its turn', async () => {
  const s = await newSession();
  const stream = await client.beta.sessions.events.stream(s.id);
  await client.beta.sessions.events.send(s.id, { events: [message('[steady] one')] });
  await collect(stream, (ev) => ev.type === 'span.model_request_start');
  const { seen } = await turn(s.id, [message('two')], 'end_turn');
  const log = await listed(s.id);
  assert.deepEqual(types(log).filter((t) => t === 'user.message' || t === 'agent.message'),
    ['user.message', 'agent.message', 'user.message', 'agent.message']);
  assert.ok(seen.length > 0);
});

await check('unknown events are refused by their index', async () => {
  const s = await newSession();
  const err = await fails(client.beta.sessions.events.send(s.id, { events: [message('fine'), { type: 'user.nonsense' }] }),
    'BadRequestError', 'invalid_request_error');
  assert.match(err.message, /events\[1\]/);
  assert.deepEqual(await all(client.beta.sessions.events.list(s.id)), []);
});

await check('a stream goes on after its cursor', async () => {
  const s = await newSession();
  await turn(s.id, [message('[hello] cursor')], 'end_turn');
  const log = await listed(s.id);
  const stream = await client.beta.sessions.events.stream(s.id, {}, { headers: { 'last-event-id': log[3].id } });
  const rest = await collect(stream, idle('end_turn'));
  assert.deepEqual(ids(rest), ids(log).slice(4));
});

await check('an idempotency key makes one message of two sends', async () => {
  const s = await newSession();
  const send = () => client.beta.sessions.events.send(s.id, { events: [message('[hello] key')] }, { headers: { 'idempotency-key': s.id } });
  const [a, b] = [await send(), await send()];
  assert.deepEqual(ids(b.data), ids(a.data));
});

await check("the SDK's own tool runner", async () => {
  const { betaTool } = await import(`${process.env.SDK}/helpers/beta/json-schema`);
  const s = await newSession();
  const ran = [];
  const weigh = betaTool({
    name: 'weigh', description: 'Weighs a thing.',
    inputSchema: { type: 'object', properties: { thing: { type: 'string' } }, required: ['thing'] },
    run: ({ thing }) => {
      ran.push(thing);
      return '{"grams":7}';
    },
  });
  await client.beta.sessions.events.send(s.id, { events: [message('[weigh] plum')] });
  const runner = client.beta.sessions.events.toolRunner(s.id, { tools: [weigh], maxIdleMs: 500 });
  for await (const call of runner) assert.equal(call.isError ?? false, false);
  assert.deepEqual(ran, ['[weigh] plum']);
  const log = await listed(s.id);
  assert.match(log.find((ev) => ev.type === 'agent.message').content[0].text, /7/);
});

await check('no credential reached a client', async () => {
  assert.ok(requests.length > 20);
  for (const s of await all(client.beta.sessions.list({ agent_id: agent.id, limit: 100 }))) {
    const log = JSON.stringify(await all(client.beta.sessions.events.list(s.id)));
    assert.ok(!log.includes(process.env.SECRET), `session ${s.id} shows the credential`);
  }
  assert.equal(isNew, process.env.SDK === 'sdk-new');
});
