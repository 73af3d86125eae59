// Elements without HTML text: everything that comes from a run is set as textContent, so it is never parsed.

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "width%") node.style.width = `${value}%`;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

/** h("a", {href: "#x"}, "text", child): a string becomes a text node. */
export const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);

/** A number as people read it; "–" for none. */
export function number(value, digits = 3) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return size >= 0.001 || size === 0 ? String(+value.toFixed(size >= 100 ? 1 : digits)) : value.toExponential(1);
}

export function duration(seconds) {
  if (typeof seconds !== "number") return "–";
  if (seconds < 0.1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

export function bytes(count) {
  if (typeof count !== "number") return "–";
  const power = Math.min(4, Math.floor(Math.log2(Math.max(count, 1)) / 10));
  return `${+(count / 1024 ** power).toFixed(1)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

/** A short number for an axis: 1200 is 1.2k. */
export function compact(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toFixed(2)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toFixed(1)}k`;
  return size >= 1e-3 || value === 0 ? String(+value.toPrecision(4)) : value.toExponential(0);
}

export function table(caption, columns, rows) {
  const head = columns.map(([name, kind]) => h("th", { scope: "col", class: kind }, name));
  return h("div", { class: "scroll" }, h("table", {}, h("caption", {}, caption), h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows)));
}
