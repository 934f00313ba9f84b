// Agents with versions (reference section 3), and what both SDK lines put on
// the wire (sections 1.1 to 1.3).
import { agentParams, all, assert, check, client, fails, ids, isNew, isTime, keys, lib, requests } from './lib.mjs';

const fields = ['type', 'id', 'version', 'name', 'description', 'system', 'model', 'tools', 'mcp_servers', 'skills',
  'multiagent', 'execution_identity', 'metadata', 'created_at', 'updated_at', 'archived_at'];

let agent;

await check('create an agent', async () => {
  agent = await client.beta.agents.create({ ...agentParams('first'), metadata: { team: 'a', gone: 'x' } });
  keys(agent, fields);
  assert.equal(agent.type, 'agent');
  assert.match(agent.id, /^agent_/);
  assert.equal(agent.version, 1);
  assert.equal(agent.description, null);
  assert.equal(agent.archived_at, null);
  assert.equal(agent.model.id, 'scripted-1');
  assert.equal(typeof agent.model.effort.type, 'string');
  assert.equal(agent.model.speed, 'standard');
  assert.deepEqual(agent.skills, []);
  assert.equal(agent.multiagent, null);
  assert.equal(agent.execution_identity.type, 'service_account');
  isTime(agent.created_at);
  const [mcp, custom] = agent.tools;
  assert.deepEqual(mcp.default_config, { enabled: true, permission_policy: { type: 'always_ask' } });
  assert.deepEqual(mcp.configs, [{ name: 'look', enabled: true, permission_policy: { type: 'always_allow' } }]);
  assert.equal(custom.input_schema.required[0], 'thing');
});

await check('the headers of this SDK line', async () => {
  const { headers, url } = requests.at(-1);
  assert.equal(headers.get('authorization')?.startsWith('Bearer ') ?? false, isNew);
  assert.equal(headers.has('x-api-key'), !isNew);
  assert.equal(headers.get('anthropic-version'), isNew ? '2026-10-21' : '2023-06-01');
  assert.equal(headers.get('anthropic-beta'), 'managed-agents-2026-04-01');
  assert.equal(new URL(url).searchParams.has('beta'), !isNew);
});

await check('every answer carries a request id', async () => {
  const { data, request_id: id, response } = await client.beta.agents.retrieve(agent.id).withResponse();
  assert.match(id, /^req_/);
  assert.equal(response.headers.get('content-type'), 'application/json');
  assert.deepEqual({ ...data }, { ...agent });
});

await check('the built-in toolset is filled in', async () => {
  const a = await client.beta.agents.create({
    name: 'built-in', model: { id: 'scripted-1', effort: 'low' },
    tools: [{ type: 'agent_toolset_20260401', configs: [{ name: 'bash', enabled: false }] }],
  });
  assert.equal(a.model.effort.type, 'low');
  assert.deepEqual(a.tools[0].default_config, { enabled: true, permission_policy: { type: 'always_allow' } });
  assert.deepEqual(a.tools[0].configs,
    [{ type: 'bash', name: 'bash', enabled: false, permission_policy: { type: 'always_allow' } }]);
});

await check('update makes a version, nothing changed makes none', async () => {
  const second = await client.beta.agents.update(agent.id,
    { version: 1, system: null, description: 'second', metadata: { gone: null, more: 'y' } });
  assert.equal(second.version, 2);
  assert.equal(second.system, null);
  assert.equal(second.description, 'second');
  assert.deepEqual(second.metadata, { team: 'a', more: 'y' });
  assert.deepEqual(second.tools, agent.tools);
  assert.ok(second.updated_at > agent.updated_at);
  const same = await client.beta.agents.update(agent.id, { version: 2, description: 'second' });
  assert.equal(same.version, 2);
  assert.equal(same.updated_at, second.updated_at);
});

await check('a stale version is refused, and asked once', async () => {
  const before = requests.length;
  await fails(client.beta.agents.update(agent.id, { version: 1, description: 'third' }), 'ConflictError', 'conflict_error');
  assert.equal(requests.length, before + 1, 'a conflict that is final must not be tried again');
});

await check('versions can be read', async () => {
  const first = await client.beta.agents.retrieve(agent.id, { version: 1 });
  assert.equal(first.version, 1);
  assert.equal(first.system, 'You are driven by a script.');
  await fails(client.beta.agents.retrieve(agent.id, { version: 9 }), 'NotFoundError', 'not_found_error');
  assert.deepEqual((await all(client.beta.agents.versions.list(agent.id, { limit: 1 }))).map((a) => a.version), [2, 1]);
});

await check('lists page through everything once', async () => {
  const other = await client.beta.agents.create({ name: 'second', model: 'scripted-1' });
  const listed = ids(await all(client.beta.agents.list({ limit: 1 })));
  assert.equal(new Set(listed).size, listed.length);
  assert.ok(listed.includes(agent.id) && listed.includes(other.id));
  assert.ok(listed.indexOf(other.id) < listed.indexOf(agent.id), 'newest first');
  const none = await client.beta.agents.list({ 'created_at[gte]': '2100-01-01T00:00:00Z' });
  assert.deepEqual(none.data, []);
  assert.equal(none.next_page, null);
  await fails(client.beta.agents.list({ page: 'nonsense' }), 'BadRequestError', 'invalid_request_error');
});

await check('an archived agent is final', async () => {
  const a = await client.beta.agents.archive(agent.id);
  isTime(a.archived_at);
  await fails(client.beta.agents.update(agent.id, { name: 'x' }), 'BadRequestError', 'invalid_request_error');
  assert.ok(!ids(await all(client.beta.agents.list())).includes(agent.id));
  assert.ok(ids(await all(client.beta.agents.list({ include_archived: true }))).includes(agent.id));
});

await check('refusals name what is wrong', async () => {
  const err = await fails(client.beta.agents.create({ name: '', model: 'scripted-1' }), 'BadRequestError', 'invalid_request_error');
  assert.match(err.message, /name/);
  await fails(client.beta.agents.retrieve('agent_nothing'), 'NotFoundError', 'not_found_error');
  const stranger = new lib.default({ baseURL: client.baseURL, apiKey: 'not-a-key' });
  await fails(stranger.beta.agents.list(), 'AuthenticationError', 'authentication_error');
});
