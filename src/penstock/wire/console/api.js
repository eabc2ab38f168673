/**
 * The broker's HTTP API: requests, their one error class, and the live stream.
 *
 * Addresses are relative to the page (`../` is the broker's root), so the Console works under any
 * path prefix of a reverse proxy. The token lives in this tab's session storage and travels in the
 * Authorization header; there are no cookies, so no other site can use it.
 */

const ROOT = new URL("../", document.baseURI);
const TOKEN = "penstock.token";

/** An unsuccessful answer of the broker or of a proxy. */
export class ApiError extends Error {
  /** @param {string} message @param {number} status 0: no answer at all */
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export const token = {
  get: () => sessionStorage.getItem(TOKEN) ?? "",
  set: (text) => (text ? sessionStorage.setItem(TOKEN, text) : sessionStorage.removeItem(TOKEN)),
};

/** @returns {string} the path with encoded parts: path`/api/v1/queues/${name}` */
export function path(strings, ...values) {
  return strings.reduce((text, part, i) => text + encodeURIComponent(values[i - 1]) + part);
}

/** Return `query` without its empty values. */
function address(target, query = {}) {
  const url = new URL(target.replace(/^\//, ""), ROOT);
  for (const [name, value] of Object.entries(query)) {
    if (value !== "" && value !== null && value !== undefined) url.searchParams.set(name, value);
  }
  return url;
}

/** JSON of `object` with one more member, whose value is JSON text and stays as it was written. */
export function withJson(object, name, text) {
  JSON.parse(text); // text that is not JSON must not break out of its member
  const members = JSON.stringify(object).slice(1, -1);
  return `{${members}${members ? "," : ""}${JSON.stringify(name)}:${text}}`;
}

async function send(method, target, { query, body, signal, anyway } = {}) {
  const headers = {};
  if (token.get()) headers.Authorization = `Bearer ${token.get()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(address(target, query), {
      method,
      headers,
      signal,
      cache: "no-store",
      body: typeof body === "string" ? body : body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The broker does not answer.", 0);
  }
  if (answer.ok || (anyway && answer.status === 503)) return answer;
  let text = "";
  try {
    text = (await answer.json()).error;
  } catch {
    /* a proxy's page: the status says it */
  }
  throw new ApiError(text || `The broker answered ${answer.status} ${answer.statusText}.`, answer.status);
}

/** `body`: JSON text, or a value to make it of. Ask and get JSON (null when there is no body). */
export async function ask(method, target, options) {
  const answer = await send(method, target, options);
  const text = await answer.text();
  return text ? JSON.parse(text) : null;
}

/** The body as it is, byte by byte. @returns {Promise<Uint8Array>} */
export async function bytes(target, signal) {
  return new Uint8Array(await (await send("GET", target, { signal })).arrayBuffer());
}

/** `anyway`: accept any status, as for /health. */
export const get = (target, query, signal, anyway = false) => ask("GET", target, { query, signal, anyway });

/**
 * Call `seen(value, name)` for each event of a stream until `signal` ends it or the stream ends. `name` is
 * that of the event: "error" is not data. Not EventSource: that cannot send the token.
 */
export async function listen(target, query, seen, signal) {
  const answer = await send("GET", target, { query, signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part
        .split("\n")
        .filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5));
      const name = part.match(/^event:\s*(\S+)/m)?.[1] ?? "message";
      if (data.length) seen(JSON.parse(data.join("\n")), name);
    }
  }
}
