// Two views of text: the resolved config of a run, and the ends of its processes' logs.

import { h } from "./dom.js";
import { load } from "./tables.js";

export class ConfigView {
  constructor() {
    this.body = h("pre", { class: "file", tabindex: "0" });
    this.root = h("section", { class: "card" }, h("div", { class: "bar-top" }, h("h2", {}, "Config"), h("span", { class: "quiet" }, "as the run resolved it, with every default")), this.body);
  }

  show(run) {
    this.run = run;
    return this.load();
  }

  async load() {
    const { run } = this, found = await load(`api/runs/${run.index}/config`);
    const text = found.refused ?? found.text;
    if (run === this.run && text !== this.body.textContent) this.body.textContent = text;
  }
}

export class LogView {
  constructor() {
    this.files = h("nav", { "aria-label": "Logs" });
    this.body = h("pre", { class: "file log", tabindex: "0" });
    this.root = h("section", { class: "card" }, h("div", { class: "bar-top" }, h("h2", {}, "Logs"), h("span", { class: "quiet" }, "the last 64 KiB of each")), this.files, this.body);
  }

  show(run, name) {
    [this.run, this.name] = [run, name];
    return this.load();
  }

  async load() {
    const asked = (this.asked = `api/runs/${this.run.index}/logs?${new URLSearchParams({ filter: this.name })}`);
    const { refused, names = [], shown, text } = await load(asked);
    if (asked !== this.asked) return;
    this.files.replaceChildren(...names.map((name) => h("a", { href: `#logs/${this.run.index}/${encodeURIComponent(name)}`, "aria-current": name === shown ? "true" : null }, name)));
    const { body } = this, before = this.written, end = before !== shown || body.scrollTop + body.clientHeight > body.scrollHeight - 20;
    const written = refused ?? (text || (names.length ? "This log is empty." : "The run has written no log."));
    if (written !== body.textContent) body.textContent = written; // what is selected there stays selected
    this.written = shown;
    if (end) body.scrollTop = body.scrollHeight;
  }
}
