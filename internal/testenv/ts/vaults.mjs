// Vaults and their credentials (reference section 15). What is sealed never
// comes back.
import { all, assert, check, client, fails, ids, isTime } from './lib.mjs';

const token = 'token-that-must-not-come-back';
const server = 'https://mcp.example.com/mcp';
let vault;
let credential;

// sealed asserts that an answer does not hold the secret.
function sealed(answer) {
  assert.ok(!JSON.stringify(answer).includes(token), 'an answer holds the secret');
  return answer;
}

await check('create, read and update a vault', async () => {
  vault = await client.beta.vaults.create({ display_name: 'first', metadata: { a: '1' } });
  assert.equal(vault.type, 'vault');
  assert.match(vault.id, /^vlt_/);
  assert.deepEqual({ ...(await client.beta.vaults.retrieve(vault.id)) }, { ...vault });
  const next = await client.beta.vaults.update(vault.id, { display_name: 'renamed' });
  assert.equal(next.display_name, 'renamed');
  assert.deepEqual(next.metadata, { a: '1' });
});

await check('keep a credential', async () => {
  credential = sealed(await client.beta.vaults.credentials.create(vault.id,
    { display_name: 'mcp', auth: { type: 'static_bearer', mcp_server_url: server, token } }));
  assert.equal(credential.type, 'vault_credential');
  assert.match(credential.id, /^vcrd_/);
  assert.equal(credential.vault_id, vault.id);
  assert.deepEqual(credential.auth, { type: 'static_bearer', mcp_server_url: server });
  sealed(await client.beta.vaults.credentials.retrieve(credential.id, { vault_id: vault.id }));
});

await check('one credential for one server', async () => {
  sealed(await fails(client.beta.vaults.credentials.create(vault.id,
    { auth: { type: 'static_bearer', mcp_server_url: server, token } }), 'ConflictError', 'conflict_error'));
});

await check('replace its token', async () => {
  const next = sealed(await client.beta.vaults.credentials.update(credential.id,
    { vault_id: vault.id, auth: { type: 'static_bearer', token: `${token}-2` } }));
  assert.equal(next.id, credential.id);
});

await check('list, archive and delete credentials', async () => {
  assert.deepEqual(ids(sealed(await all(client.beta.vaults.credentials.list(vault.id)))), [credential.id]);
  isTime((await client.beta.vaults.credentials.archive(credential.id, { vault_id: vault.id })).archived_at);
  assert.deepEqual(await all(client.beta.vaults.credentials.list(vault.id)), []);
  assert.equal((await client.beta.vaults.credentials.delete(credential.id, { vault_id: vault.id })).type, 'vault_credential_deleted');
  await fails(client.beta.vaults.credentials.retrieve(credential.id, { vault_id: vault.id }), 'NotFoundError', 'not_found_error');
});

await check('archive and delete vaults', async () => {
  const inside = await client.beta.vaults.credentials.create(vault.id,
    { auth: { type: 'static_bearer', mcp_server_url: server, token } });
  isTime((await client.beta.vaults.archive(vault.id)).archived_at);
  isTime((await client.beta.vaults.credentials.retrieve(inside.id, { vault_id: vault.id })).archived_at);
  assert.ok(!ids(await all(client.beta.vaults.list({ limit: 1 }))).includes(vault.id));
  assert.ok(ids(await all(client.beta.vaults.list({ include_archived: true }))).includes(vault.id));
  assert.equal((await client.beta.vaults.delete(vault.id)).type, 'vault_deleted');
  await fails(client.beta.vaults.retrieve(vault.id), 'NotFoundError', 'not_found_error');
});
