// The log: events with filters by kind, device and text. At most the last ones that fit are drawn.
import { counted, known, make, span, watchShown } from "./words.js";

const MOST = 200;
const WARNINGS = new Set(["death", "silence", "failure", "given_up", "retry", "diverged", "damage", "server_job_died", "own_states_lost", "unable", "refusal", "revoked", "dropout", "pictures_failed"]);
const HIDDEN = new Set(["n", "event", "virtual_time", "wall_time"]);

export function said(event) {
  return Object.entries(event).filter(([key, value]) => !HIDDEN.has(key) && known(value))
    .map(([key, value]) => `${key.replaceAll("_", " ")} ${typeof value === "number" && !Number.isInteger(value) ? value.toFixed(2) : typeof value === "object" ? JSON.stringify(value) : value}`).join(", ");
}

export class Log {
  constructor(run, parts) {
    this.run = run;
    this.parts = parts;
    this.off = new Set();
    for (const part of ["search", "bydevice", "follow"]) parts[part].addEventListener("input", () => this.draw());
    this.seen = watchShown(parts.log, () => this.news());
  }

  // Draws the events, also those of a log that does not follow what is new.
  draw() {
    this.drawn = false;
    this.news();
  }

  news() {
    if (!this.seen.now && this.drawn) return;
    const counts = Object.entries(this.run.kinds), all = counts.reduce((sum, [, count]) => sum + count, 0), kept = this.run.events.length;
    const key = counts.join() + [...this.off].join();
    if (key !== this.key) {
      this.key = key;
      const focused = document.activeElement?.dataset?.kind;
      this.parts.kinds.replaceChildren(...counts.sort().map(([kind, count]) => make("button", {
        type: "button", "data-kind": kind, "aria-pressed": String(!this.off.has(kind)), class: this.off.has(kind) ? "off" : "",
        onclick: () => { if (!this.off.delete(kind)) this.off.add(kind); this.draw(); } }, `${kind} ${count.toLocaleString("en")}`)));
      if (focused) this.parts.kinds.querySelector(`[data-kind="${CSS.escape(focused)}"]`)?.focus();
    }
    if (!this.parts.follow.checked && this.drawn) return;
    const text = this.parts.search.value.trim().toLowerCase(), device = this.parts.bydevice.value.trim();
    const found = [];
    for (let place = this.run.events.length - 1; place >= 0 && found.length < MOST; place--) {
      const event = this.run.events[place];
      if (this.off.has(event.event) || (device && String(event.device) !== device)) continue;
      if (text && !`${event.event} ${said(event)}`.toLowerCase().includes(text)) continue;
      found.push(event);
    }
    this.drawn = true;
    this.parts.log.replaceChildren(...found.map((event) => make("div", { class: WARNINGS.has(event.event) ? "warn" : "" },
      make("span", { title: "time of the experiment" }, span(event.virtual_time)), make("b", {}, event.event), make("span", {}, said(event)))));
    const more = found.length === MOST ? "the last " : "";
    const among = kept < all ? ` (found among the last ${kept.toLocaleString("en")} of ${all.toLocaleString("en")})` : "";
    this.parts.logcount.textContent = `${more}${counted(found.length, "event")}, the newest first${among}`;
  }
}
