// Files (reference section 17) and the resources of sessions (section 7).
import { agentParams, all, assert, check, client, environment, fails, ids, isNew, isTime, keys, lib, requests } from './lib.mjs';

const fields = ['type', 'id', 'filename', 'mime_type', 'size_bytes', 'created_at', 'downloadable', 'expires_at', 'scope'];

// The older line asks for the former shape of lists.
const files = client.beta.files;
const agent = await client.beta.agents.create(agentParams('files'));
const env = await environment();
const create = (more) => client.beta.sessions.create({ agent: agent.id, environment_id: env.id, ...more });
const upload = async (name, text, type) => files.upload({ file: await lib.toFile(Buffer.from(text), name, type && { type }) });

let sent;

await check('upload', async () => {
  sent = await upload('räport "1".json', '{"a":1}', 'application/json');
  keys(sent, fields);
  assert.match(sent.id, /^file_/);
  assert.equal(sent.type, 'file');
  assert.match(sent.filename, /^räport .*\.json$/);
  assert.equal(sent.mime_type, 'application/json');
  assert.equal(sent.size_bytes, 7);
  assert.equal(sent.downloadable, false);
  assert.deepEqual([sent.expires_at, sent.scope], [null, null]);
  isTime(sent.created_at);
  assert.deepEqual({ ...(await files.retrieveMetadata(sent.id)) }, { ...sent });
  assert.equal((await upload('../up\\data.csv', 'a,b')).filename, 'data.csv');
});

await check('what was uploaded cannot be downloaded', async () => {
  const err = await fails(files.download(sent.id), 'BadRequestError', 'invalid_request_error');
  assert.equal(err.error.error.details?.error_code, 'file_not_downloadable');
  await fails(files.retrieveMetadata('file_nothing'), 'NotFoundError', 'not_found_error');
});

await check('lists go through all pages', async () => {
  const made = [sent.id];
  for (let i = 0; i < 3; i++) made.unshift((await upload(`${i}.txt`, 'x')).id);
  const walked = ids(await all(files.list({ limit: 2 })));
  assert.equal(new Set(walked).size, walked.length);
  assert.deepEqual(walked.filter((id) => made.includes(id)), made);
  const legacy = requests.at(-1).headers.get('anthropic-beta')?.includes('files-api-2025-04-14') ?? false;
  const page = await files.list({ limit: 2 });
  if (legacy) {
    assert.equal(page.has_more, true);
    assert.deepEqual([page.first_id, page.last_id], [page.data[0].id, page.data[1].id]);
    const back = await files.list({ limit: 2, before_id: made[2] });
    assert.deepEqual(ids(back.data), made.slice(0, 2));
  } else {
    assert.equal(typeof page.next_page, 'string');
  }
});

await check('a session is given files', async () => {
  const s = await create({ resources: [{ type: 'file', file_id: sent.id, mount_path: 'in/data.json' }] });
  assert.equal(s.resources.length, 1);
  const [first] = s.resources;
  keys(first, ['id', 'type', 'file_id', 'mount_path', 'created_at', 'updated_at']);
  assert.match(first.id, /^sesrsc_/);
  assert.equal(first.mount_path, '/mnt/session/uploads/in/data.json');
  assert.notEqual(first.file_id, sent.id);

  const added = await client.beta.sessions.resources.add(s.id, { type: 'file', file_id: sent.id });
  keys(added, ['id', 'type', 'file_id', 'mount_path', 'created_at', 'updated_at']);
  assert.equal(added.mount_path, `/mnt/session/uploads/${sent.id}`);
  assert.deepEqual(ids(await all(client.beta.sessions.resources.list(s.id))), [first.id, added.id]);
  assert.deepEqual(ids(await all(client.beta.sessions.resources.list(s.id, { limit: 1 }))), [first.id, added.id]);
  assert.deepEqual({ ...(await client.beta.sessions.resources.retrieve(added.id, { session_id: s.id })) }, { ...added });
  await fails(client.beta.sessions.resources.add(s.id, { type: 'file', file_id: sent.id }), 'BadRequestError', 'invalid_request_error');
  await fails(client.beta.sessions.resources.add(s.id, { type: 'file', file_id: 'file_nothing' }), 'NotFoundError', 'not_found_error');

  // By scope: the session's own copies, and of no other session.
  const mine = await all(files.list({ scope_id: s.id }));
  assert.deepEqual(ids(mine), [added.file_id, first.file_id]);
  for (const f of mine) {
    assert.deepEqual(f.scope, { type: 'session', id: s.id });
    assert.equal(f.filename, sent.filename);
  }
  assert.deepEqual(ids(await all(files.list({ scope_id: s.id, limit: 1 }))), ids(mine));
  assert.deepEqual(await all(files.list({ scope_id: (await create()).id })), []);

  const gone = await client.beta.sessions.resources.delete(added.id, { session_id: s.id });
  assert.deepEqual({ ...gone }, { id: added.id, type: 'session_resource_deleted' });
  assert.deepEqual(ids(await all(client.beta.sessions.resources.list(s.id))), [first.id]);

  // The copy outlives the file, and goes with the session.
  assert.deepEqual({ ...(await files.delete(sent.id)) }, { id: sent.id, type: 'file_deleted' });
  assert.equal((await files.retrieveMetadata(first.file_id)).size_bytes, 7);
  await client.beta.sessions.delete(s.id);
  await fails(files.retrieveMetadata(first.file_id), 'NotFoundError', 'not_found_error');
});

await check('a repository keeps its token to itself', async () => {
  const token = 'ghp_secretOfThisScript';
  const s = await create({ resources: [{ type: 'github_repository', url: 'https://github.com/a/b', authorization_token: token,
    checkout: { type: 'branch', name: 'main' } }] });
  const [repo] = s.resources;
  keys(repo, ['id', 'type', 'url', 'mount_path', 'checkout', 'created_at', 'updated_at']);
  assert.equal(repo.mount_path, '/workspace/b');
  assert.deepEqual(repo.checkout, { type: 'branch', name: 'main' });
  const next = await client.beta.sessions.resources.update(repo.id, { session_id: s.id, authorization_token: `${token}2` });
  assert.ok(next.updated_at > repo.updated_at);
  assert.ok(!JSON.stringify([s, next, await client.beta.sessions.retrieve(s.id)]).includes(token));
  await client.beta.sessions.archive(s.id);
  assert.deepEqual(ids(await all(client.beta.sessions.resources.list(s.id))), [repo.id]);
  const late = await upload('late', 'x');
  for (const call of [
    () => client.beta.sessions.resources.update(repo.id, { session_id: s.id, authorization_token: token }),
    () => client.beta.sessions.resources.delete(repo.id, { session_id: s.id }),
    () => client.beta.sessions.resources.add(s.id, { type: 'file', file_id: late.id }),
  ]) await fails(call(), 'BadRequestError', 'invalid_request_error');
});

if (isNew) {
  await check('files outside of beta', async () => {
    const f = await client.files.upload({ file: await lib.toFile(Buffer.from('x'), 'x.txt'), expires_in_seconds: 3600 });
    assert.equal(Date.parse(f.expires_at) - Date.parse(f.created_at), 3_600_000);
    const page = await client.files.list({ ids: [f.id, 'file_nothing'] });
    assert.deepEqual(ids(page.data), [f.id]);
    assert.equal(page.next_page, null);
    await fails(client.files.list({ ids: [f.id], limit: 3 }), 'BadRequestError', 'invalid_request_error');
  });
}
