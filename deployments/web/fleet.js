
// The live page of the fleet: follows v1/fleet/events, and has `fleet_view.js` show what they say.

const MOST_PAUSE_S = 10;
const MOST_CHANGES = 30;
const KEY = "lora-fleet-key";

const sleep = (s) => new Promise((resolve) => setTimeout(resolve, 1000 * s));

// Changes

function say(text) {
  const item = document.createElement("li");
  const time = document.createElement("time");
  time.textContent = new Date().toLocaleTimeString();
  item.append(time, text);
  byId("changes").prepend(item);
  byId("no-changes").hidden = true;
  while (byId("changes").children.length > MOST_CHANGES) byId("changes").lastElementChild.remove();
}

function sayChanges(before, replicasBefore) {
  if (before === null) return;
  for (const [id, replica] of state.replicas) {
    const [was, is] = [replicasBefore.get(id), replica].map((one) => one && healthOf(one)[0].replace(/^\S+ /, ""));
    if (was === undefined) say(`Replica ${id} came: ${is}`);
    else if (was !== is && !is.endsWith("behind")) say(`Replica ${id}: ${is}`);
  }
  for (const id of replicasBefore.keys()) if (!state.replicas.has(id)) say(`Replica ${id} is gone`);
  const was = new Map(before.adapters.map((one) => [one.name, one]));
  for (const one of state.fleet.adapters) {
    const known = was.get(one.name);
    was.delete(one.name);
    if (known ? known.state !== one.state || known.generation !== one.generation : one.epoch > before.epoch) {
      say(`Adapter ${one.name}: ${one.state}`);
    }
  }
  const areAll = (fleet) => fleet.adapters.length === sum(Object.values(fleet.num_adapters), (number) => number);
  if (areAll(before) && areAll(state.fleet)) for (const name of was.keys()) say(`Adapter ${name} is gone`);
  for (const [name, error] of Object.entries(state.fleet.failures)) {
    if (before.failures[name]?.unix_s !== error.unix_s) say(`Error of ${name}: ${error.text}`);
  }
}

// News

function take(event) {
  const [before, replicasBefore] = [state.fleet, new Map(state.replicas)];
  if (event.fleet !== null) {
    if (event.whole) state.replicas.clear();
    for (const id of event.gone) state.replicas.delete(id);
    for (const [id, replica] of Object.entries(event.replicas)) state.replicas.set(id, replica);
    for (const [id, replica] of state.replicas) noteHits(id, replica);
    for (const id of state.hits.keys()) if (!state.replicas.has(id)) state.hits.delete(id);
    state.fleet = event.fleet;
  }
  state.activeAt = seconds();
  state.reason = null;
  state.fault = event.fault;
  if (event.fault === null) {
    state.heardAt = seconds();
    state.aheadS = event.fleet.unix_s - Date.now() / 1000;
  }
  show();
  if (event.fleet !== null) sayChanges(before, replicasBefore);
  tick();
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) if (block.startsWith("data: ")) yield JSON.parse(block.slice("data: ".length));
  }
}

/** What the server says of a refusal. */
async function refusal(answer) {
  const body = await answer.json().catch(() => null);
  return body?.error?.message ?? `the server answers ${answer.status}`;
}

async function follow() {
  for (let pauseS = 0.5; ; pauseS = Math.min(2 * pauseS, MOST_PAUSE_S)) {
    await visible();
    state.abort = new AbortController();
    state.activeAt = seconds();
    try {
      const headers = state.key ? { Authorization: `Bearer ${state.key}` } : {};
      const options = { headers, cache: "no-store", credentials: "omit", signal: state.abort.signal };
      const answer = await fetch("v1/fleet/events", options);
      if (answer.status === 401 || answer.status === 403) {
        await signIn(state.key || answer.status === 403 ? await refusal(answer) : "");
        pauseS = 0.25;
        continue;
      }
      if (!answer.ok) throw new Error(await refusal(answer));
      for await (const event of events(answer.body)) {
        pauseS = 0.25;
        take(event);
      }
    } catch (error) {
      const { aborted, reason } = state.abort.signal;
      console.warn(error);
      // A browser has many words for a server that is away.
      state.reason = aborted ? reason.message : error instanceof TypeError ? "the server cannot be reached" : error.message;
    }
    tick();
    await sleep(pauseS * (0.75 + Math.random() / 2));
  }
}

/** Wait until somebody can see the page: one that nobody sees asks for nothing. */
async function visible() {
  while (document.hidden) await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
}

// Signing in

const stored = {
  // Where a browser keeps nothing, the key is asked for again with each load of the page.
  get: () => { try { return sessionStorage.getItem(KEY) ?? ""; } catch { return ""; } },
  set: (key) => { try { sessionStorage.setItem(KEY, key); } catch { /* kept in `state` alone */ } },
};

function forget() {
  Object.assign(state, { fleet: null, fault: null, reason: null, heardAt: null });
  state.replicas.clear();
  state.hits.clear();
  byId("changes").replaceChildren();
  show();
}

/** Ask for a key, and wait until there is one. */
async function signIn(why) {
  forget();
  state.key = "";
  stored.set("");
  document.title = "Sign in - Fleet";
  document.body.dataset.phase = "signed-out";
  setText(byId("sign-in-why"), why);
  setText(byId("connection-text"), "Signed out");
  setText(byId("heard"), "");
  byId("sign-out").hidden = true;
  byId("sign-in").hidden = false;
  byId("key").focus();
  // Nothing is awaited from the server meanwhile.
  state.activeAt = Infinity;
  await new Promise((resolve) => {
    byId("sign-in").onsubmit = (event) => {
      event.preventDefault();
      const key = byId("key").value.trim();
      const isKey = /^[!-~]+$/.test(key);
      if (!isKey) return setText(byId("sign-in-why"), "Keys are made of visible ASCII characters, without spaces between.");
      byId("key").value = "";
      state.key = key;
      stored.set(key);
      byId("sign-in").hidden = true;
      document.body.dataset.phase = "connecting";
      setText(byId("connection-text"), "Connecting");
      resolve();
    };
  });
}

byId("sign-out").addEventListener("click", () => {
  state.key = "";
  stored.set("");
  forget();
  state.abort.abort(new Error("signed out"));
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) state.abort.abort(new Error("paused while nobody looked"));
});

state.key = stored.get();
setInterval(() => { if (document.body.dataset.phase !== "signed-out") tick(); }, 1000);
follow();
