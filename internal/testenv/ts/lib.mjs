// What the scripts of this folder share. Each script drives a real server with
// the SDK that the variable SDK names (sdk-new or sdk-old), prints "ok" lines,
// and exits with 1 on the first mismatch. They need Node 18 and nothing else
// but that SDK.
import assert from 'node:assert/strict';

const sdk = process.env.SDK;
const url = process.env.ANTHROPIC_BASE_URL;
if (!sdk || !url || !process.env.ANTHROPIC_API_KEY) {
  console.error('set SDK, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY');
  process.exit(2);
}

// A script that hangs is a mismatch too.
const limit = setTimeout(() => {
  console.error(`not done after two minutes; the last ok was: ${last}`);
  process.exit(1);
}, 120_000);
limit.unref();

let last = 'none';

export const lib = await import(sdk);
export const isNew = sdk === 'sdk-new';
export { assert };

// requests is what the SDK really sent, newest last.
export const requests = [];
const counting = async (target, init) => {
  const headers = new Headers(init?.headers);
  requests.push({ method: init?.method ?? 'GET', url: String(target), headers });
  return fetch(target, init);
};

export const client = new lib.default({ baseURL: url, fetch: counting });

// run names a check, runs it and prints its line.
export async function check(name, f) {
  await f();
  last = name;
  console.log(`ok ${name}`);
}

// fails expects a call to fail with an SDK error class and an error type of the
// API, and returns the error.
export async function fails(promise, cls, type) {
  let got;
  try {
    got = await promise;
  } catch (err) {
    assert.ok(err instanceof lib[cls], `want ${cls}, got ${err?.constructor?.name}: ${err?.message}`);
    assert.equal(err.error?.type, 'error');
    assert.equal(err.error?.error?.type, type);
    assert.match(err.requestID ?? '', /^req_/);
    assert.equal(err.error.request_id, err.requestID);
    return err;
  }
  assert.fail(`want ${cls}, got an answer: ${JSON.stringify(got).slice(0, 300)}`);
}

// all collects every page of a list.
export async function all(page) {
  const out = [];
  for await (const item of page) out.push(item);
  return out;
}

export const ids = (items) => items.map((x) => x.id);
export const types = (items) => items.map((x) => x.type);

export function isTime(v) {
  assert.match(v, /^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z$/);
}

// keys asserts that an object has exactly these keys. Fields that begin with
// an extension of ours are named in extra.
export function keys(obj, want, extra = []) {
  const got = Object.keys(obj).filter((k) => !extra.includes(k)).sort();
  assert.deepEqual(got, [...want].sort());
}

export const message = (text) => ({ type: 'user.message', content: [{ type: 'text', text }] });

// collect reads a stream until an event for which done returns true, that
// event included, and closes the stream. A stream that ends earlier is a
// mismatch.
export async function collect(stream, done) {
  const out = [];
  for await (const ev of stream) {
    out.push(ev);
    if (done(ev)) return out;
  }
  assert.fail(`the stream ended after ${types(out).join(' ')}`);
}

export const idle = (reason) => (ev) =>
  ev.type === 'session.status_idle' && (reason === undefined || ev.stop_reason.type === reason);

// turn opens a stream, sends events and returns what the stream showed up to
// the idle event.
export async function turn(session, events, reason, params) {
  const stream = await client.beta.sessions.events.stream(session, params);
  const sent = await client.beta.sessions.events.send(session, { events });
  return { sent: sent.data, seen: await collect(stream, idle(reason)) };
}

// agentWithTools makes the agent that the model scripts expect: a custom tool,
// and the MCP server behind the connector "outside", whose tool look is
// allowed and whose other tools ask.
export function agentParams(name) {
  return {
    name,
    model: 'scripted-1',
    system: 'You are driven by a script.',
    mcp_servers: [{ type: 'url', name: 'outside', url: 'planaria:outside' }],
    tools: [
      {
        type: 'mcp_toolset',
        mcp_server_name: 'outside',
        configs: [{ name: 'look', permission_policy: { type: 'always_allow' } }],
      },
      {
        type: 'custom',
        name: 'weigh',
        description: 'Weighs a thing.',
        input_schema: { type: 'object', properties: { thing: { type: 'string' } }, required: ['thing'] },
      },
    ],
  };
}

export async function environment() {
  return client.beta.environments.create({ name: `ts-${sdk}-${process.hrtime.bigint()}` });
}
