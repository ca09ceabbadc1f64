// The buttons that break things. They send the token that the command has printed.
import { counted, known } from "./words.js";

const KEY = "fedemu-token";

export function takeToken() {
  const found = /(?:^#|&)token=([\w-]+)/.exec(location.hash);
  if (found) {
    sessionStorage.setItem(KEY, found[1]);
    history.replaceState(null, "", location.pathname + location.hash.replace(found[0], "").replace(/^&/, "#"));
  }
}

export class Breaking {
  constructor(run, parts, field) {
    Object.assign(this, { run, parts, field });
    parts.token.value = sessionStorage.getItem(KEY) || "";
    parts.token.addEventListener("input", () => { sessionStorage.setItem(KEY, parts.token.value.trim()); this.able(); });
    parts.chosen.addEventListener("input", () => { field.selected = new Set(this.devices()); field.all(); this.able(); });
    for (const button of parts.breaking.querySelectorAll("[data-action]")) button.addEventListener("click", () => this.act(button.dataset.action));
    parts.resume.addEventListener("click", () => this.act("resume"));
    parts.tokenform.addEventListener("submit", (event) => event.preventDefault());
    this.able();
  }

  chosen(devices) {
    this.parts.chosen.value = ranges(devices);
    this.able();
  }

  devices() {
    const most = this.run.about.devices, found = new Set();
    for (const part of this.parts.chosen.value.split(",")) {
      const range = /^\s*(\d+)\s*(?:-\s*(\d+)\s*)?$/.exec(part);
      if (range) for (let device = Number(range[1]); device <= Math.min(Number(range[2] ?? range[1]), most - 1); device++) found.add(device);
    }
    return [...found];
  }

  able() {
    const token = Boolean(this.parts.token.value.trim()), count = this.devices().length;
    // 0 is a coordinator that is at work elsewhere: nothing of it can be broken here, and it is not to be resumed.
    const { coordinator } = this.run.status, here = Boolean(coordinator);
    this.parts.chosencount.textContent = count ? `${counted(count, "device")} selected` : "none selected";
    for (const button of this.parts.breaking.querySelectorAll("[data-action]")) {
      const needsDevices = ["kill", "freeze", "release"].includes(button.dataset.action);
      button.disabled = !token || !here || (needsDevices && !count);
    }
    this.parts.resume.disabled = !token || known(coordinator);
  }

  say(text, bad) {
    this.parts.told.textContent = text;
    this.parts.told.classList.toggle("bad", Boolean(bad));
    this.parts.told.classList.toggle("told", true);
  }

  async act(action) {
    this.say("…");
    try {
      const answer = await fetch(`/api/runs/${this.run.about.number}/break`, {
        method: "POST", headers: { "Content-Type": "application/json", "X-Fedemu-Token": this.parts.token.value.trim() },
        body: JSON.stringify({ action, devices: this.devices() }) });
      const told = await answer.json();
      this.say(answer.ok ? told.done : told.error, !answer.ok);
    } catch {
      this.say("the page's server does not answer", true);
    }
  }
}

function ranges(devices) {
  const parts = [];
  for (let place = 0; place < devices.length; place++) {
    const from = devices[place];
    while (devices[place + 1] === devices[place] + 1) place++;
    parts.push(from === devices[place] ? `${from}` : `${from}-${devices[place]}`);
  }
  return parts.join(", ");
}
