// Environments (reference section 4).
import { all, assert, check, client, fails, ids, isTime } from './lib.mjs';

let env;
const name = `environment-${process.hrtime.bigint()}`;

await check('create an environment', async () => {
  env = await client.beta.environments.create({
    name,
    description: 'limited',
    config: { type: 'cloud', networking: { type: 'limited', allowed_hosts: ['example.com'] } },
    metadata: { a: '1' },
  });
  assert.equal(env.type, 'environment');
  assert.match(env.id, /^env_/);
  assert.deepEqual(env.config.networking,
    { type: 'limited', allowed_hosts: ['example.com'], allow_mcp_servers: false, allow_package_managers: false });
  for (const manager of ['apt', 'cargo', 'gem', 'go', 'npm', 'pip']) assert.deepEqual(env.config.packages[manager], []);
  isTime(env.created_at);
  assert.equal(env.archived_at, null);
});

await check('without a config it is open', async () => {
  const open = await client.beta.environments.create({ name: `${name}-open` });
  assert.equal(open.config.type, 'cloud');
  assert.equal(open.config.networking.type, 'unrestricted');
  assert.equal(open.description, null);
});

await check('read and update it', async () => {
  assert.deepEqual({ ...(await client.beta.environments.retrieve(env.id)) }, { ...env });
  const next = await client.beta.environments.update(env.id, { description: null, metadata: { a: null, b: '2' } });
  assert.equal(next.description, null);
  assert.deepEqual(next.metadata, { b: '2' });
  assert.deepEqual(next.config, env.config);
});

await check('its kind is fixed', async () => {
  const err = await fails(client.beta.environments.update(env.id, { config: { type: 'self_hosted' } }),
    'BadRequestError', 'invalid_request_error');
  assert.equal(err.error.error.details.error_code, 'invalid_config_type_change');
});

await check('list, archive and delete', async () => {
  const listed = ids(await all(client.beta.environments.list({ limit: 1 })));
  assert.equal(new Set(listed).size, listed.length);
  assert.ok(listed.includes(env.id));
  isTime((await client.beta.environments.archive(env.id)).archived_at);
  const err = await fails(client.beta.environments.update(env.id, { description: 'x' }), 'BadRequestError', 'invalid_request_error');
  assert.equal(err.error.error.details.error_code, 'environment_archived');
  assert.ok(!ids(await all(client.beta.environments.list())).includes(env.id));
  assert.ok(ids(await all(client.beta.environments.list({ include_archived: true }))).includes(env.id));
  const gone = await client.beta.environments.delete(env.id);
  assert.equal(gone.type, 'environment_deleted');
  assert.equal(gone.id, env.id);
  await fails(client.beta.environments.retrieve(env.id), 'NotFoundError', 'not_found_error');
});
