// Sessions (reference section 6) and their primary thread (section 8).
import { agentParams, all, assert, check, client, environment, fails, idle, collect, ids, isTime, keys, message, turn, types } from './lib.mjs';

const fields = ['type', 'id', 'status', 'agent', 'environment_id', 'title', 'metadata', 'resources', 'vault_ids', 'budget',
  'outcome_evaluations', 'stats', 'usage', 'deployment_id', 'created_at', 'updated_at', 'archived_at'];
const snapshot = ['type', 'id', 'version', 'name', 'description', 'system', 'model', 'tools', 'mcp_servers', 'skills',
  'multiagent', 'execution_identity'];

const agent = await client.beta.agents.create(agentParams('sessions'));
const env = await environment();
const create = (more) => client.beta.sessions.create({ agent: agent.id, environment_id: env.id, ...more });

await check('create by agent id', async () => {
  const s = await create();
  keys(s, fields, ['planaria']);
  keys(s.agent, snapshot);
  assert.match(s.id, /^sesn_/);
  assert.equal(s.status, 'idle');
  assert.equal(s.title, null);
  assert.equal(s.budget, null);
  assert.deepEqual([s.resources, s.vault_ids, s.outcome_evaluations], [[], [], []]);
  assert.equal(s.usage.input_tokens, 0);
  assert.equal(s.stats.active_seconds, 0);
  assert.deepEqual((await client.beta.sessions.retrieve(s.id)).agent, s.agent);
});

await check('create with a pinned version', async () => {
  await client.beta.agents.update(agent.id, { version: 1, system: 'newer' });
  const s = await create({ agent: { type: 'agent', id: agent.id, version: 1 } });
  assert.equal(s.agent.version, 1);
  assert.equal(s.agent.system, 'You are driven by a script.');
  assert.equal((await create()).agent.version, 2);
});

await check('create with overrides', async () => {
  const s = await create({
    agent: { type: 'agent_with_overrides', id: agent.id, system: null, model: 'scripted-2', tools: [], mcp_servers: [] },
  });
  assert.equal(s.agent.system, null);
  assert.equal(s.agent.model.id, 'scripted-2');
  assert.deepEqual([s.agent.tools, s.agent.mcp_servers], [[], []]);
  assert.equal((await client.beta.agents.retrieve(agent.id)).model.id, 'scripted-1');
});

await check('create with initial events', async () => {
  const s = await create({ title: 'begun', initial_events: [message('[hello] at once')] });
  assert.equal(s.status, 'running');
  const stream = await client.beta.sessions.events.stream(s.id);
  const now = await client.beta.sessions.retrieve(s.id);
  if (now.status === 'running') await collect(stream, idle('end_turn'));
  else stream.controller.abort();
  const log = await all(client.beta.sessions.events.list(s.id));
  assert.equal(types(log).filter((t) => t === 'user.message').length, 1);
  assert.equal(log.at(-1).type, 'session.status_idle');
  const done = await client.beta.sessions.retrieve(s.id);
  assert.equal(done.status, 'idle');
  assert.ok(done.usage.input_tokens > 0 && done.usage.output_tokens > 0);
});

await check('what cannot be created is refused whole', async () => {
  await fails(create({ agent: 'agent_nothing' }), 'NotFoundError', 'not_found_error');
  await fails(create({ environment_id: 'env_nothing' }), 'NotFoundError', 'not_found_error');
  const before = ids(await all(client.beta.sessions.list({ limit: 100 }))).length;
  await fails(create({ initial_events: [message('fine'), message('')] }), 'BadRequestError', 'invalid_request_error');
  assert.equal(ids(await all(client.beta.sessions.list({ limit: 100 }))).length, before);
});

await check('lists go forward and back', async () => {
  const mine = await client.beta.agents.create({ name: 'listed', model: 'scripted-1' });
  const made = [];
  for (let i = 0; i < 3; i++) made.push((await create({ agent: mine.id, title: `n${i}` })).id);
  const first = await client.beta.sessions.list({ agent_id: mine.id, limit: 2 });
  assert.deepEqual(ids(first.data), [made[2], made[1]]);
  assert.equal(first.prev_page, null);
  const second = await first.getNextPage();
  assert.deepEqual(ids(second.data), [made[0]]);
  assert.equal(second.next_page, null);
  const back = await client.beta.sessions.list({ agent_id: mine.id, limit: 2, page: second.prev_page });
  assert.deepEqual(ids(back.data), ids(first.data));
  assert.deepEqual(ids(await all(client.beta.sessions.list({ agent_id: mine.id, order: 'asc' }))), made);
  assert.deepEqual(ids(await all(client.beta.sessions.list({ agent_id: mine.id, statuses: ['running'] }))), []);
  const third = await client.beta.sessions.retrieve(made[2]);
  assert.deepEqual(ids(await all(client.beta.sessions.list({ agent_id: mine.id, 'created_at[gte]': third.created_at }))), [made[2]]);
});

await check('update title and metadata', async () => {
  const s = await create({ metadata: { a: '1', b: '2' } });
  const stream = await client.beta.sessions.events.stream(s.id);
  const next = await client.beta.sessions.update(s.id, { title: 'named', metadata: { a: null, c: '3' } });
  assert.equal(next.title, 'named');
  assert.deepEqual(next.metadata, { b: '2', c: '3' });
  const [updated] = await collect(stream, (ev) => ev.type === 'session.updated');
  assert.equal(updated.title, 'named');
  assert.deepEqual(updated.metadata, { b: '2', c: '3' });
  assert.ok(!('budget' in updated) && !('agent' in updated));
});

await check('update the tools of an idle session', async () => {
  const s = await create();
  const next = await client.beta.sessions.update(s.id, { agent: { tools: [], mcp_servers: [] } });
  assert.deepEqual([next.agent.tools, next.agent.mcp_servers], [[], []]);
  assert.equal((await client.beta.agents.retrieve(agent.id)).version, 2);
});

await check('a running session is neither archived nor deleted', async () => {
  const s = await create();
  const stream = await client.beta.sessions.events.stream(s.id);
  await client.beta.sessions.events.send(s.id, { events: [message('[slow] work')] });
  await collect(stream, (ev) => ev.type === 'span.model_request_start');
  await fails(client.beta.sessions.archive(s.id), 'BadRequestError', 'invalid_request_error');
  await fails(client.beta.sessions.delete(s.id), 'BadRequestError', 'invalid_request_error');
  await turn(s.id, [{ type: 'user.interrupt' }], 'end_turn');
  const gone = await client.beta.sessions.delete(s.id);
  assert.equal(gone.type, 'session_deleted');
  assert.equal(gone.id, s.id);
  await fails(client.beta.sessions.retrieve(s.id), 'NotFoundError', 'not_found_error');
  await fails(client.beta.sessions.events.list(s.id), 'NotFoundError', 'not_found_error');
});

await check('an archived session is read-only', async () => {
  const s = await create();
  await turn(s.id, [message('[hello] once')], 'end_turn');
  const stream = await client.beta.sessions.events.stream(s.id);
  const gone = await client.beta.sessions.archive(s.id);
  assert.equal(gone.status, 'terminated');
  isTime(gone.archived_at);
  await collect(stream, (ev) => ev.type === 'session.status_terminated');
  await fails(client.beta.sessions.events.send(s.id, { events: [message('more')] }), 'BadRequestError', 'invalid_request_error');
  assert.ok(types(await all(client.beta.sessions.events.list(s.id))).includes('agent.message'));
  assert.ok(!ids(await all(client.beta.sessions.list({ limit: 100 }))).includes(s.id));
  assert.ok(ids(await all(client.beta.sessions.list({ limit: 100, include_archived: true }))).includes(s.id));
});

await check('a deleted session ends its streams', async () => {
  const s = await create();
  const stream = await client.beta.sessions.events.stream(s.id);
  await client.beta.sessions.delete(s.id);
  const seen = [];
  for await (const ev of stream) seen.push(ev);
  assert.equal(seen.at(-1)?.type, 'session.deleted');
});

await check('the primary thread', async () => {
  const s = await create();
  const { seen } = await turn(s.id, [message('[hello] thread')], 'end_turn');
  const threads = await all(client.beta.sessions.threads.list(s.id));
  assert.equal(threads.length, 1);
  const [thread] = threads;
  assert.equal(thread.type, 'session_thread');
  assert.match(thread.id, /^sthr_/);
  assert.equal(thread.session_id, s.id);
  assert.equal(thread.parent_thread_id, null);
  assert.equal(thread.status, 'idle');
  assert.equal(seen.find((ev) => ev.type === 'session.thread_status_running').session_thread_id, thread.id);
  assert.equal((await client.beta.sessions.threads.retrieve(thread.id, { session_id: s.id })).id, thread.id);
  const events = await all(client.beta.sessions.threads.events.list(thread.id, { session_id: s.id }));
  assert.ok(types(events).includes('agent.message'));
  const stream = await client.beta.sessions.threads.events.stream(thread.id, { session_id: s.id });
  await client.beta.sessions.events.send(s.id, { events: [message('again')] });
  assert.ok(types(await collect(stream, (ev) => ev.type === 'session.thread_status_idle')).includes('agent.message'));
});

await check('resources are empty', async () => {
  const s = await create();
  assert.deepEqual(await all(client.beta.sessions.resources.list(s.id)), []);
});
