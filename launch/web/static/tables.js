// Tables that the server filters and cuts into pages: nodes, tasks, transcripts.

import { duration, h, number, table } from "./dom.js";

const LIMIT = 50;

export class Table {
  /** view: title, api, columns [[name, class]], row(item, run) -> [cells], link(item, run), states, hint, query(text). */
  constructor(view) {
    this.view = view;
    this.offset = 0;
    this.rows = [];
    this.input = h("input", { type: "search", placeholder: view.hint, "aria-label": `Filter ${view.title.toLowerCase()}`, oninput: () => this.refilter() });
    this.select = view.states && h("select", { "aria-label": "State", onchange: () => this.refilter() }, h("option", { value: "" }, "every state"), view.states.map((state) => h("option", {}, state)));
    this.count = h("span", { class: "quiet", role: "status" });
    this.back = h("button", { type: "button", onclick: () => this.turn(-LIMIT) }, "newer");
    this.next = h("button", { type: "button", onclick: () => this.turn(LIMIT) }, "older");
    if (view.api === "nodes") [this.back.textContent, this.next.textContent] = ["back", "next"];
    this.body = h("div");
    this.root = h("section", { class: "card" }, h("div", { class: "bar-top" }, h("h2", {}, view.title), this.input, this.select ?? "", this.count, this.back, this.next), this.body);
  }

  show(run, find) {
    if (find !== this.input.value || run !== this.run) this.offset = 0;
    this.run = run;
    this.input.value = find;
    return this.load();
  }

  refilter() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      history.replaceState(null, "", `#${this.view.api}/${this.run.index}/${encodeURIComponent(this.input.value)}`);
      this.offset = 0;
      this.load();
    }, 150);
  }

  turn(by) {
    this.offset = Math.max(0, this.offset + by);
    this.load();
  }

  async load() {
    const words = new URLSearchParams({ offset: this.offset, limit: LIMIT });
    const text = this.input.value.trim();
    for (const [name, value] of Object.entries(this.view.query ? this.view.query(text) : { filter: text })) words.set(name, value);
    if (this.select?.value) words.set("state", this.select.value);
    const asked = (this.asked = `api/runs/${this.run.index}/${this.view.api}?${words}`);
    const found = await load(asked);
    if (asked !== this.asked) return;
    if (found.refused) {
      this.count.textContent = "";
      this.body.replaceChildren(h("p", { class: "quiet" }, found.refused));
      return;
    }
    const { total, rows, more } = found; // "more": the server has not counted those behind
    this.back.hidden = this.next.hidden = total <= rows.length && !more;
    this.back.disabled = this.offset === 0;
    this.next.disabled = !more && this.offset + rows.length >= total;
    this.count.textContent = more ? `${number(this.offset + 1)} to ${number(total)}, and more` : rows.length < total ? `${number(this.offset + 1)} to ${number(this.offset + rows.length)} of ${number(total)}` : `${number(total)} in all`;
    this.rows = rows;
    const chosen = this.body.querySelector("tr[aria-selected=true]")?.dataset.key;
    const made = rows.map((item) => {
      const link = this.view.link?.(item, this.run);
      const cells = this.view.row(item, this.run).map((cell, i) => h("td", { class: this.view.columns[i][1] }, i === 0 && link ? h("a", { href: link }, cell) : cell));
      const row = h("tr", { "data-key": this.view.key(item), class: link ? "link" : "", onclick: (event) => link && !getSelection().toString() && !event.target.closest("a") && (location.hash = link) }, cells);
      if (row.dataset.key === chosen) row.setAttribute("aria-selected", "true");
      return row;
    });
    this.body.replaceChildren(made.length ? table(`${this.view.title} of ${this.run.title}`, this.view.columns, made) : h("p", { class: "quiet" }, this.view.empty));
  }

  /** Move the selection by keys. */
  move(by) {
    const rows = [...this.body.querySelectorAll("tbody tr")];
    const now = rows.findIndex((row) => row.getAttribute("aria-selected") === "true");
    rows[now]?.removeAttribute("aria-selected");
    const row = rows[Math.min(rows.length - 1, Math.max(0, now + by))];
    row?.setAttribute("aria-selected", "true");
    row?.scrollIntoView({ block: "nearest" });
  }

  open() {
    this.body.querySelector("tr[aria-selected=true] a")?.click();
  }
}

export async function load(address) {
  try {
    const answer = await fetch(address);
    return await answer.json();
  } catch {
    return { refused: "the server does not answer" };
  }
}

// States of processes and tasks by colour: the text beside it names the state itself.
export const KINDS = {
  training: ["training", "ready", "taken"], generating: ["generating", "committed"], weights: ["publishing", "flipping", "joining"],
  waiting: ["waiting", "leased"], other: [], dead: ["dead", "gone", "excluded"],
};
const KIND = Object.fromEntries(Object.entries(KINDS).flatMap(([kind, states]) => [kind, ...states].map((state) => [state, kind])));
export const kindOf = (state) => KIND[state.split(",")[0]] ?? "other";
export const stateCell = (state) => h("span", { class: `state ${kindOf(state)}` }, state);

export const makeNodes = () => new Table({
  title: "Nodes", api: "nodes", hint: "id, host, state or reason  ( / )", empty: "No node is known.",
  columns: [["node"], ["state"], ["version", "right"], ["since", "right"], ["leases", "right"], ["tokens/s", "right"], ["episodes", "right"], ["host"], ["waits for"]],
  key: (node) => node.id,
  link: (node, run) => `#timeline/${run.index}/${encodeURIComponent(node.id)}`,
  row: (node) => [node.id, stateCell(node.state), number(node.policy_version), duration(node.since_s), number(node.leases), number(Math.round(node.tokens_per_s)), `${number(node.episodes_running)}${node.concurrency ? ` of ${number(node.concurrency)}` : ""}`, node.host, node.waiting_on],
});

const versions = ({ version_min: low, version_max: high }) => (low === null ? "–" : low === high ? String(low) : `${low}–${high}`);

export const makeTasks = () => new Table({
  title: "Tasks", api: "tasks", hint: "serial, node, reason or step:N  ( / )", empty: "No such task.",
  states: ["pending", "leased", "ready", "taken", "committed", "dead", "filtered"],
  columns: [["task", "right"], ["state"], ["step", "right"], ["versions", "right"], ["attempts", "right"], ["reward", "right"], ["nodes"], ["reason"]],
  key: (task) => task.serial,
  link: (task, run) => `#transcript/${run.index}/${task.serial}`,
  row: (task) => [String(task.serial), stateCell(task.state + (task.filtered ? ", filtered" : "")), task.step ?? "–", versions(task), number(task.attempts), number(task.reward_mean), task.nodes.join(", "), task.reason],
});

/** A number is a step, `reward>=0.5` a bound, other text a reason to keep a transcript. */
function transcriptQuery(text) {
  const [, sign, bound] = /^reward\s*([<>]=?|=)\s*(-?\d*\.?\d+)$/.exec(text) ?? [];
  const least = Number(bound) + (sign === ">" ? 1e-9 : 0), most = Number(bound) - (sign === "<" ? 1e-9 : 0);
  if (sign) return sign === "=" ? { least, most } : sign[0] === ">" ? { least } : { most };
  return /^\d+$/.test(text) ? { step: text } : { filter: text };
}

export const transcriptLink = (t, run) => `#transcript/${run.index}/${t.serial}/${t.sample}/${t.step ?? ""}`;
export const preview = (t) => h("div", { class: "preview" }, h("p", { class: "quiet" }, t.prompt), h("p", {}, t.answer || "–"));

export const makeTranscripts = () => new Table({
  title: "Transcripts", api: "transcripts", hint: "step, best, failed, reward<0.5  ( / )", empty: "No such transcript is kept; telemetry.transcripts says which are.",
  query: transcriptQuery,
  columns: [["task"], ["prompt and answer", "wide-cell"], ["reward", "right"], ["advantage", "right"], ["step", "right"], ["tokens", "right"], ["kept as"], ["stop"]],
  key: (t) => `${t.serial} ${t.sample} ${t.step}`,
  link: transcriptLink,
  row: (t) => [`${t.serial}, sample ${t.sample}`, preview(t), number(t.reward), number(t.advantage), t.step ?? "–", number(t.sampled_tokens), t.why.join(", "), t.error || t.stop_reason],
});
