// Runs as the page's stream tells of them. Views are told which parts have changed.
import { known } from "./words.js";

const KEPT_ROWS = 4000, KEPT_EVENTS = 3000, KEPT_ASKS = 60, KEPT_SAMPLES = 600;

function decoded(text) {
  const raw = atob(text);
  const values = new Uint8Array(raw.length);
  for (let place = 0; place < raw.length; place++) values[place] = raw.charCodeAt(place);
  return values;
}

// Half of many rows: of two that follow each other the last evaluated one, and the last row. The server does so, too.
function halved(rows) {
  const kept = rows.filter((row, place) => {
    const pair = place % 2 ? [rows[place - 1], row] : [row, rows[place + 1]];
    return row === (pair[1] && (known(pair[1].accuracy) || !known(pair[0].accuracy)) ? pair[1] : pair[0]);
  });
  return kept[kept.length - 1] === rows[rows.length - 1] ? kept : [...kept, rows[rows.length - 1]];
}

export class Run extends EventTarget {
  constructor(about) {
    super();
    this.about = about;
    this.ready = false;
    this.connected = false;
    this.rows = [];
    this.events = [];
    this.kinds = {}; // how often each event came in the whole run
    this.asks = [];
    this.settings = [];
    this.status = {};
    this.machine = [];
    this.states = new Uint8Array(about.devices);
    this.outcomes = new Uint8Array(about.devices).fill(6);
    this.visits = new Uint32Array(about.devices);
    this.frames = 0;
    this.drawing = 0;
  }

  connection(there) {
    this.connected = there;
    this.dispatchEvent(new CustomEvent("change", { detail: new Set(["connection"]) }));
  }

  begin(all) {
    this.about = all.run;
    this.message = all.message;
    this.settings = all.settings;
    this.rows = all.rows;
    this.events = all.events;
    this.kinds = all.kinds;
    this.asks = all.asks;
    this.status = all.status;
    this.machine = all.machine;
    this.states = decoded(all.fleet.states);
    this.outcomes = decoded(all.fleet.outcomes);
    this.visits = Uint32Array.from(all.fleet.visits);
    this.ready = true;
    this.told(["all", "rows", "events", "asks", "status", "machine", "fleet"]);
  }

  tick(news) {
    if (!this.ready || news.message <= this.message) return; // the snapshot holds it
    this.message = news.message;
    const parts = Object.keys(news);
    if (news.rows) this.rows = this.rows.concat(news.rows);
    while (this.rows.length > KEPT_ROWS) this.rows = halved(this.rows);
    if (news.events) this.events = this.events.concat(news.events).slice(-KEPT_EVENTS);
    if (news.kinds) this.kinds = news.kinds;
    if (news.asks) this.asks = this.asks.concat(news.asks).slice(-KEPT_ASKS);
    for (const device of news.visited || []) this.visits[device] += 1;
    if (news.status) this.status = news.status;
    if (news.machine) this.machine = this.machine.concat([news.machine]).slice(-KEPT_SAMPLES);
    if (news.fleet) {
      const states = decoded(news.fleet.states), outcomes = decoded(news.fleet.outcomes);
      if (news.fleet.at) {
        news.fleet.at.forEach((device, place) => {
          this.states[device] = states[place];
          this.outcomes[device] = outcomes[place];
        });
      } else {
        this.states = states;
        this.outcomes = outcomes;
      }
    }
    this.told(parts);
  }

  told(parts) {
    this.dispatchEvent(new CustomEvent("change", { detail: new Set(parts) }));
  }

  get last() {
    return this.rows[this.rows.length - 1] || {};
  }
}

// Opens the stream, and tells each run what is about it. One connection serves all: browsers allow few to one server.
// A run of which it has not heard before is told to ``arrive``. A server that shows other runs, since it was started again
// or another one has its port, loads the page again.
export function connect(runs, arrive) {
  const source = new EventSource("/api/stream"), all = (there) => runs.forEach((run) => run.connection(there));
  source.addEventListener("open", () => all(true));
  source.addEventListener("error", () => {
    all(false);
    // A browser gives up for good after an answer that is no stream, as while the server starts again.
    if (source.readyState === EventSource.CLOSED) setTimeout(() => connect(runs, arrive), 1500);
  });
  const told = (name, tell) => source.addEventListener(name, (event) => tell(JSON.parse(event.data)));
  told("runs", ({ directories }) => {
    if (runs.every((run, number) => run.about.directory === directories[number])) return;
    source.close();
    history.replaceState(null, "", location.pathname); // the number of a run in the address means another one now
    location.reload();
  });
  told("snapshot", (one) => {
    if (!runs[one.run.number]) arrive(one.run);
    runs[one.run.number].begin(one);
  });
  told("tick", (one) => runs[one.number].tick(one));
}

// Calls a view with all parts that have changed since. The pause after it is at least four times as long as it took, so
// that a slow browser still answers to people.
export function follow(run, draw) {
  const parts = new Set();
  let asked = false, rested = 0;
  const later = (event) => {
    event.detail.forEach((part) => parts.add(part));
    if (asked) return;
    asked = true;
    setTimeout(() => requestAnimationFrame(() => {
      asked = false;
      const changed = new Set(parts), began = performance.now();
      parts.clear();
      run.frames += 1;
      draw(changed);
      const took = performance.now() - began;
      run.drawing += took;
      rested = performance.now() + 4 * took;
    }), Math.max(0, rested - performance.now()));
  };
  run.addEventListener("change", later);
  later(new CustomEvent("change", { detail: new Set(["all", "rows", "events", "asks", "status", "machine", "fleet", "connection"]) }));
  return () => run.removeEventListener("change", later);
}
