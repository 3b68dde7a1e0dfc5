// What the live page shows, from what `fleet.js`, which comes behind this in one script, puts into `state`.
//
// Names of adapters and words of errors may be anybody's: they become text, never markup.

const STALE_S = 5; // Without news for so long, what is shown is said to be stale;
const SILENT_S = 15; // and after so long another connection is tried.
const HITS_OVER_S = 60;

const byId = (id) => document.getElementById(id);
const seconds = () => performance.now() / 1000;
const count = (number) => number.toLocaleString("en");

function percent(share) {
  if (share > 0 && share < 0.001) return "< 0.1 %";
  return `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}

const state = {
  key: "",
  fleet: null,
  replicas: new Map(),
  fault: null,
  reason: null, // Why there is no connection.
  heardAt: null, // When the last event came, by this machine's clock;
  activeAt: 0, // and when anything was last tried or came.
  aheadS: 0, // The server's clock before this machine's.
  hits: new Map(), // Replica -> samples of its hits and misses.
  abort: new AbortController(),
};

// The document

/** Make the children of `parent` those of `items`, a list of [key, item], in this order; those of items that stay are kept. */
function reconcile(parent, items, make, fill) {
  const kept = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const [key, item] of new Map(items)) {
    const child = kept.get(key) ?? make();
    if (!kept.delete(key)) child.dataset.key = key;
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
    fill(child, item);
  }
  for (const child of kept.values()) child.remove();
}

const fromTemplate = (id) => () => byId(id).content.firstElementChild.cloneNode(true);
const field = (element, name) => element.querySelector(`[data-field="${name}"]`);

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function put(element, texts) {
  for (const [name, text] of Object.entries(texts)) setText(field(element, name), String(text));
}

function putBadge(element, [text, kind]) {
  setText(element, text);
  element.dataset.kind = kind;
}

function setFill(element, share) {
  element.style.setProperty("--fill", `${(100 * share).toFixed(0)}%`);
}

/** Show rows in a table, or that there are none. */
function showRows(name, rows, fill) {
  byId(`no-${name}`).hidden = rows.length > 0;
  byId(name).hidden = rows.length === 0;
  reconcile(byId(name).tBodies[0], rows, fromTemplate(`${name.slice(0, -1)}-template`), fill);
}

// Words

const serverNow = () => Date.now() / 1000 + state.aheadS;

function age(s) {
  if (s < 60) return `${Math.max(0, Math.floor(s))} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  return s < 86400 ? `${Math.floor(s / 3600)} h` : `${Math.floor(s / 86400)} d`;
}

function healthOf(replica) {
  if (replica.fault) return ["✕ stalled", "bad"];
  if (replica.leaving) return ["◔ leaving", "warn"];
  if (!replica.joined) return ["◔ joining", "warn"];
  if (replica.lag) return [`▲ ${count(replica.lag)} behind`, "warn"];
  if (replica.num_refused || Object.keys(replica.stalled).length) return ["▲ serving, not all", "warn"];
  return ["✓ serving", "good"];
}

function adapterState(adapter) {
  if (adapter.state !== "ready") return [`◔ ${adapter.state}`, "warn"];
  return adapter.num_refused ? [`▲ not on ${adapter.num_refused}`, "warn"] : ["✓ ready", "good"];
}

const hitsOf = (replica) => ({ hits: replica.counts.num_hits ?? 0, misses: replica.counts.num_misses ?? 0 });
const rate = ({ hits, misses }) => (hits + misses ? `${percent(hits / (hits + misses))} of ${count(hits + misses)}` : "none");

function noteHits(id, replica) {
  const now = { at: seconds(), ...hitsOf(replica) };
  const samples = state.hits.get(id) ?? [];
  // An engine that starts anew counts anew.
  const last = samples.at(-1);
  const going = last && (last.hits > now.hits || last.misses > now.misses) ? [] : samples;
  const first = going.findLastIndex((sample) => sample.at <= now.at - HITS_OVER_S);
  state.hits.set(id, [...going.slice(Math.max(0, first)), now]);
}

function recentHits(id) {
  const samples = state.hits.get(id);
  const [first, last] = [samples[0], samples.at(-1)];
  return { hits: last.hits - first.hits, misses: last.misses - first.misses };
}

const sum = (items, of) => items.reduce((total, item) => total + of(item), 0);

// Sections

function showTotals() {
  const replicas = [...state.replicas.values()];
  const recent = [...state.replicas.keys()].map(recentHits);
  const serving = replicas.filter((replica) => replica.joined && !replica.leaving && !replica.fault).length;
  const totals = {
    "Replicas serving": `${serving} of ${replicas.length}`,
    "Slots used": `${count(sum(replicas, (one) => one.num_slots_used))} of ${count(sum(replicas, (one) => one.num_slots))}`,
    Running: count(sum(replicas, (one) => one.num_running)),
    Waiting: count(sum(replicas, (one) => one.num_waiting)),
    "Slot hits, last minute": rate({ hits: sum(recent, (one) => one.hits), misses: sum(recent, (one) => one.misses) }),
    Adapters: count(sum(Object.values(state.fleet.num_adapters), (number) => number)),
  };
  const make = () => {
    const pair = document.createElement("div");
    pair.append(document.createElement("dt"), document.createElement("dd"));
    return pair;
  };
  reconcile(byId("totals"), Object.entries(totals).map(([name, text]) => [name, [name, text]]), make, (pair, texts) => {
    texts.forEach((text, index) => setText(pair.children[index], text));
  });
  setText(byId("versions"), `Epoch ${state.fleet.epoch}, router actor ${state.fleet.router_id.slice(0, 8)}`);
  document.title = `${serving} of ${replicas.length} replicas - Fleet`;
}

function showReplica(element, [id, replica, most]) {
  const counts = replica.counts;
  const residents = replica.occupants.filter((one) => one.place === "slot");
  const changing = Math.max(0, replica.num_slots_used - residents.length);
  const missing = [...Object.keys(replica.stalled), ...Object.keys(replica.refused)];
  put(element, {
    name: id,
    why: replica.fault ?? (missing.length ? `Does not serve now: ${missing.join(", ")}` : ""),
    epoch: replica.epoch,
    running: count(replica.num_running),
    waiting: count(replica.num_waiting),
    hits: rate(hitsOf(replica)),
    evictions: count(counts.num_evictions ?? 0),
    loads: Object.entries(counts.num_loads ?? {}).map(([tier, number]) => `${count(number)} ${tier}`).join(", ") || "none",
    slots:
      `${residents.length} of ${replica.num_slots} slots hold an adapter` +
      (changing ? `, ${changing} being written or drained` : "") +
      `; ${count(replica.num_in_memory)} adapters in host memory`,
    caption: `Adapters on replica ${id}`,
  });
  putBadge(field(element, "state"), healthOf(replica));
  const cells = Array.from({ length: replica.num_slots }, (_, index) => [
    String(index),
    index < residents.length ? residents[index] : { place: index < residents.length + changing ? "change" : "free", share: 0 },
  ]);
  reconcile(field(element, "strip"), cells, () => document.createElement("i"), (cell, one) => {
    cell.dataset.place = one.place;
    setFill(cell, one.share / most);
  });
  const rows = replica.occupants.map((one) => [JSON.stringify([one.adapter, one.place]), [one, most]]);
  element.querySelector("table").hidden = rows.length === 0;
  reconcile(element.querySelector("tbody"), rows, fromTemplate("occupant-template"), showOccupant);
}

const MARKS = { slot: "■", loading: "◔", queue: "…" };
const TAGS = { slot: "", loading: "on its way into a slot", queue: "has no slot" };

function showOccupant(row, [one, most]) {
  const isBase = one.adapter === null;
  const tags = [one.pinned ? "pinned" : "", isBase ? "needs no slot" : TAGS[one.place]];
  put(row, {
    mark: isBase ? "○" : MARKS[one.place],
    name: one.adapter ?? "(base model)",
    tag: tags.filter(Boolean).join(", "),
    share: isBase ? "" : percent(one.share),
    requests: `${count(one.num_running)} + ${count(one.num_waiting)}`,
  });
  setFill(row.querySelector(".heat"), (one.share ?? 0) / most);
  field(row, "age").dataset.since = one.since_unix_s ?? "";
}

const LOADS = {
  loading: "being loaded on every replica", unloading: "being unloaded", replacing: "its next content is being loaded",
  ready: "catching up",
};

function showLoads() {
  const changing = state.fleet.adapters
    .filter((one) => one.state !== "ready" || one.num_pending)
    .map((one) => ({
      name: one.name, what: LOADS[one.state], where: `${one.num_pending} of ${state.replicas.size} replicas have yet to answer`,
    }));
  const intoSlots = [...state.replicas].flatMap(([id, replica]) =>
    replica.occupants
      .filter((one) => one.place === "loading")
      .map((one) => ({ name: one.adapter, what: "on its way into a slot", where: `replica ${id}` })),
  );
  const rows = [...changing, ...intoSlots].map((one) => [JSON.stringify([one.name, one.what, one.where]), one]);
  showRows("loads", rows, put);
}

function showAdapters(most) {
  const { adapters, num_adapters: byState } = state.fleet;
  const total = sum(Object.values(byState), (number) => number);
  const words = Object.entries(byState).map(([name, number]) => `${count(number)} ${name}`).join(", ");
  const part = `The ${adapters.length} shown are those that are being changed, then the busiest, then the last changed.`;
  setText(byId("adapters-note"), total ? `${words}. ${adapters.length < total ? part : ""}` : "There are none.");
  byId("adapters").hidden = adapters.length === 0;
  const rows = adapters.map((one) => [one.name, one]);
  reconcile(byId("adapters").tBodies[0], rows, fromTemplate("adapter-template"), (row, one) => {
    put(row, {
      name: one.name, tag: one.pinned ? "pinned" : "", share: percent(one.share),
      slots: `${one.num_in_slots} of ${state.replicas.size}`, memory: `${one.num_in_memory} of ${state.replicas.size}`,
      epoch: one.epoch,
    });
    putBadge(field(row, "state"), adapterState(one));
    setFill(row.querySelector(".heat"), one.share / most);
  });
}

function showErrors() {
  const failures = Object.entries(state.fleet.failures).map(([name, error]) => [name, error.text, error.unix_s]);
  const there = [...state.replicas].flatMap(([id, replica]) => {
    const rest = replica.num_refused - Object.keys(replica.refused).length;
    return [
      ...(replica.fault ? [[`replica ${id}`, replica.fault]] : []),
      ...[...Object.entries(replica.stalled), ...Object.entries(replica.refused)].map(([name, why]) => [
        `${name || "(base model)"} on replica ${id}`, why,
      ]),
      ...(rest > 0 ? [[`replica ${id}`, `it refuses ${count(rest)} more`]] : []),
    ];
  });
  const rows = [...failures, ...there].map(([of, what, since]) => [JSON.stringify([of, what]), { of, what, since }]);
  showRows("errors", rows, (row, { of, what, since }) => {
    put(row, { of, what });
    field(row, "since").dataset.since = since ?? "";
  });
}

function show() {
  byId("sign-in").hidden = true;
  byId("view").hidden = state.fleet === null;
  byId("sign-out").hidden = state.key === "";
  if (state.fleet === null) return;
  const shares = [...state.replicas.values()].flatMap((replica) => replica.occupants.map((one) => one.share ?? 0));
  const most = Math.max(1e-9, ...shares, ...state.fleet.adapters.map((one) => one.share));
  showTotals();
  byId("no-replicas").hidden = state.replicas.size > 0;
  const replicas = [...state.replicas].map(([id, replica]) => [id, [id, replica, most]]);
  reconcile(byId("replicas"), replicas, fromTemplate("replica-template"), showReplica);
  showLoads();
  showAdapters(most);
  showErrors();
}

/** What changes with time alone. */
function tick() {
  if (seconds() - state.activeAt > SILENT_S) state.abort.abort(new Error(`nothing was heard for ${SILENT_S} s`));
  const quietS = state.heardAt === null ? null : seconds() - state.heardAt;
  const why = state.fault ?? state.reason ?? (quietS !== null && quietS > STALE_S ? "nothing has been heard since" : null);
  const phase = why !== null ? "stale" : quietS === null ? "connecting" : "live";
  document.body.dataset.phase = phase;
  setText(byId("connection-text"), { stale: `▲ Stale: ${why}`, connecting: "Connecting", live: "● Live" }[phase]);
  setText(byId("heard"), phase === "stale" && quietS !== null ? `last news ${age(quietS)} ago` : "");
  if (phase === "stale" && !document.title.startsWith("(stale)")) document.title = `(stale) ${document.title}`;
  for (const element of document.querySelectorAll("[data-since]")) {
    setText(element, element.dataset.since === "" ? "–" : age(serverNow() - Number(element.dataset.since)));
  }
}
