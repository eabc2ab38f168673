/** Figures, times and sizes as people read them. Unknown (null, undefined, NaN) is a dash, never 0. */

export const UNKNOWN = "–";
const known = (value) => value !== null && value !== undefined && !Number.isNaN(value);

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const one = new Intl.NumberFormat("en-US", { maximumFractionDigits: 1 });
const compact = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });

/** 1,204,311 */
export const count = (value) => (known(value) ? whole.format(value || 0) : UNKNOWN);

/** 1.2M, for axes and places without room */
export const short = (value) => (known(value) ? compact.format(value) : UNKNOWN);

/** 1,240/s; below ten one digit more */
export function rate(value) {
  if (!known(value)) return UNKNOWN;
  return (value > 0 && value < 10 ? one : whole).format(value || 0);
}

/** 412 bytes, 1.2 KiB, 3.4 GiB */
export function size(bytes) {
  if (!known(bytes)) return UNKNOWN;
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  let value = bytes;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${(unit && value < 100 ? one : whole).format(value)} ${units[unit]}`;
}

/** 840 ms, 4.2 s, 14 min, 3 h, 2 days */
export function duration(seconds) {
  if (!known(seconds)) return UNKNOWN;
  if (seconds < 0.0005) return "0 ms";
  if (seconds < 0.01) return `${(seconds * 1000).toFixed(1)} ms`;
  if (seconds < 1) return `${whole.format(seconds * 1000)} ms`;
  if (seconds < 10) return `${one.format(seconds)} s`;
  if (seconds < 120) return `${whole.format(seconds)} s`;
  if (seconds < 7200) return `${whole.format(seconds / 60)} min`;
  if (seconds < 172800) return `${whole.format(seconds / 3600)} h`;
  return `${whole.format(seconds / 86400)} days`;
}

/** "4 s ago" of milliseconds since 1970 */
export function ago(at, now = Date.now()) {
  return known(at) ? `${duration(Math.max(0, (now - at) / 1000))} ago` : UNKNOWN;
}

const two = (value) => String(value).padStart(2, "0");

/** 09:12:04 in the viewer's zone; with `millis` 09:12:04.117 */
export function clock(at, millis = false) {
  if (!known(at)) return UNKNOWN;
  const t = new Date(at);
  const text = `${two(t.getHours())}:${two(t.getMinutes())}:${two(t.getSeconds())}`;
  return millis ? `${text}.${String(t.getMilliseconds()).padStart(3, "0")}` : text;
}

/** 16 Nov 09:12 */
export function day(at) {
  if (!known(at)) return UNKNOWN;
  const t = new Date(at);
  return `${t.getDate()} ${t.toLocaleString("en-US", { month: "short" })} ${two(t.getHours())}:${two(t.getMinutes())}`;
}

/** 09:12:04.117 of today, 16 Nov 09:12:04.117 of another day */
export function when(at) {
  const today = known(at) && new Date(at).toDateString() === new Date().toDateString();
  return today || !known(at) ? clock(at, true) : `${day(at).slice(0, -6)} ${clock(at, true)}`;
}

/** 2026-11-16 09:12:04.117 (08:12:04.117 UTC): what stands in a title */
export function moment(at) {
  if (!known(at)) return "unknown";
  const t = new Date(at);
  return `${t.getFullYear()}-${two(t.getMonth() + 1)}-${two(t.getDate())} ${clock(at, true)} (${t.toISOString().slice(11, 23)} UTC)`;
}

/** 1 message, 31 messages */
export function plural(n, word, many = `${word}s`) {
  return `${count(n)} ${n === 1 ? word : many}`;
}
