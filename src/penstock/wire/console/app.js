/**
 * The Console's frame: navigation, addresses, keys, the strip of problems, and the page in the middle.
 *
 * An address is `#/queues/orders?filter=...&sort=-depth`: everything a view shows is in it, so it can
 * be sent to a colleague. A page is an object:
 *
 *   title(params)                the title of the tab and the crumbs
 *   load(params, query, signal)  its data; asked on entry, then every `every` ms while it is visible
 *   view(data, context)          its markup; also drawn again when the live state changes
 *   actions                      name -> async (element, context): what data-action="name" does
 *
 * A page that fails to load shows the broker's error and retries.
 */
import { ApiError, token } from "./api.js";
import { html, on, render } from "./html.js";
import { GO, header, keys, navigation, signInForm } from "./frame.js";
import { live, start, watch, whoAmI } from "./live.js";
import { followPointer } from "./components/chart.js";
import { followRows, release } from "./components/table.js";
import { show } from "./components/dialog.js";
import { problemActions } from "./components/problems.js";
import { openSearch } from "./components/search.js";
import { pages } from "./pages/index.js";

const REFRESH = 2000;
const app = document.getElementById("app");
const toast = document.getElementById("toast");

/** @type {{subject: string|null, role: string, authentication: boolean}|null} */
let me = null;
let page = null; // { route, params, query, data, error, state }
let loading = null;
let timer = 0;

const ROLES = ["read_only", "read_write", "admin"];
/** Return whether our token has `role`. */
const may = (role) => ROLES.indexOf(me?.role ?? "read_only") >= ROLES.indexOf(role);

// Addresses

function parse(address) {
  const [path, search = ""] = address.replace(/^#/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  return { parts, query: Object.fromEntries(new URLSearchParams(search)) };
}

function match(parts) {
  for (const route of pages) {
    const wanted = route.path.split("/").filter(Boolean);
    const fits = (part, i) => part.startsWith(":") || part === parts[i];
    if (wanted.length !== parts.length || !wanted.every(fits)) continue;
    const named = wanted.map((part, i) => [part.slice(1), parts[i]]).filter((_, i) => wanted[i].startsWith(":"));
    return { route, params: Object.fromEntries(named) };
  }
  return null;
}

/** Go to another address. */
export function go(address) {
  location.hash = address.replace(/^#/, "");
}

/** Return the address of this view with other query values; empty ones are removed. */
function withQuery(changes) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries({ ...page.query, ...changes })) {
    if (value !== "" && value !== null && value !== undefined) query.set(name, value);
  }
  const path = location.hash.replace(/^#/, "").split("?")[0];
  return `#${path}${[...query].length ? `?${query}` : ""}`;
}

function navigate() {
  const { parts, query } = parse(location.hash || "#/overview");
  const matched = match(parts);
  const same =
    page && matched && page.route === matched.route && JSON.stringify(page.params) === JSON.stringify(matched.params);
  page = matched
    ? { ...matched, query, data: same ? page.data : null, error: null, state: same ? page.state : {} }
    : { route: null, query, data: null, error: null, state: {} };
  document.title = `${page.route ? page.route.title(page.params) : "Not found"} · Penstock`;
  release();
  draw();
  refresh();
  if (!same) {
    document.getElementById("main")?.focus({ preventScroll: true });
    requestAnimationFrame(() =>
      document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" }),
    );
  }
}

// Data

async function refresh() {
  clearTimeout(timer);
  loading?.abort();
  const mine = page;
  if (!mine?.route?.load || document.hidden) return;
  loading = new AbortController();
  try {
    mine.data = await mine.route.load(mine.params, mine.query, loading.signal);
    mine.error = null;
  } catch (error) {
    if (error.name === "AbortError") return;
    if (error instanceof ApiError && error.status === 401) {
      signIn();
      return;
    }
    mine.error = error;
  }
  if (mine !== page) return;
  draw();
  timer = setTimeout(refresh, mine.route.every ?? REFRESH);
}

/** Show a message for a few seconds. */
function say(text, kind = "note") {
  render(toast, html`<p class="${kind}">${text}</p>`);
  clearTimeout(say.timer);
  say.timer = setTimeout(() => render(toast, ""), 6000);
}

const context = {
  get params() {
    return page.params;
  },
  get query() {
    return page.query;
  },
  get data() {
    return page.data;
  },
  get state() {
    return page.state;
  },
  get me() {
    return me;
  },
  may,
  go,
  say,
  withQuery,
  refresh: () => {
    release();
    return refresh();
  },
  draw: () => draw(),
};

// Drawing

function content() {
  if (!page.route)
    return html`<h1>Not found</h1>
      <p>There is no view at this address. <a href="#/overview">Overview</a></p>`;
  if (page.error) {
    return html`${page.data ? page.route.view(page.data, context) : html`<h1>${page.route.title(page.params)}</h1>`}
      <p class="problem" role="alert">${page.error.message}</p>`;
  }
  if (page.route.load && !page.data)
    return html`<h1>${page.route.title(page.params)}</h1>
      <p class="loading">…</p>`;
  return page.route.view(page.data, context);
}

function crumbs() {
  if (!page.route) return "";
  return page.route.crumbs ? page.route.crumbs(page.params, page.data) : html`<b>${page.route.title(page.params)}</b>`;
}

let drawn = 0;
function draw() {
  if (drawn) return; // once per frame, however much changed
  drawn = requestAnimationFrame(() => {
    drawn = 0;
    if (!page) return;
    render(
      app,
      html`${navigation()}${header(crumbs(), me)}
        <main id="main" tabindex="-1">${content()}</main>`,
    );
  });
}

// Signing in

function signIn(problem = "") {
  clearTimeout(timer);
  page = null;
  document.title = "Sign in · Penstock";
  render(app, signInForm(problem));
}

on(document, "submit", "form[data-form='sign-in']", (event, form) => {
  event.preventDefault();
  token.set(new FormData(form).get("token").trim());
  begin();
});

// Keys and clicks

let pressed = "";

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target instanceof Element && event.target.closest("input, textarea, select, dialog");
  if (typing) {
    if (event.key === "Escape" && event.target.matches("[data-filter]")) event.target.blur();
    return;
  }
  if (pressed === "g" && GO[event.key]) go(`#/${GO[event.key]}`);
  else if (KEY_ACTIONS[event.key]) {
    event.preventDefault();
    KEY_ACTIONS[event.key]();
  } else if (event.key === "ArrowDown" && event.target.matches("body, main")) {
    const row = document.querySelector("main tr[data-href]");
    if (row) event.preventDefault();
    row?.focus();
  }
  pressed = event.key;
});

const actions = {
  find: () => {
    const filter = document.querySelector("[data-filter]");
    filter?.focus();
    filter?.select();
  },
  search: () => openSearch(go),
  keys: () => show({ title: "Keys", content: keys() }),
  theme: () => {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const now = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
    document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
    localStorage.setItem("penstock.theme", document.documentElement.dataset.theme);
  },
  "sign-out": () => {
    token.set("");
    location.reload();
  },
  problems: () => {
    problemActions.problems();
    draw();
  },
  acknowledge: () => {
    problemActions.acknowledge(live.now?.problems ?? []);
    draw();
  },
  "show-acknowledged": () => {
    problemActions["show-acknowledged"]();
    draw();
  },
  sort: (element) => go(withQuery({ sort: element.dataset.sort, offset: "" })),
  copy: async (element) => {
    await navigator.clipboard?.writeText(element.dataset.text);
    say("Copied.");
  },
};

const KEY_ACTIONS = { "/": actions.search, f: actions.find, "?": actions.keys };

on(document, "click", "[data-action]", async (event, element) => {
  if (element.disabled) return;
  const action = page?.route?.actions?.[element.dataset.action] ?? actions[element.dataset.action];
  if (!action) return;
  if (element.tagName !== "INPUT") event.preventDefault();
  try {
    await action(element, context);
  } catch (error) {
    if (error.name !== "AbortError") say(error.message, "bad");
  }
});

/** The query parameters that a change of this input resets: the position in the list. */
const clears = ({ dataset }) =>
  Object.fromEntries((dataset.clears ?? "offset cursor").split(" ").map((name) => [name, ""]));

let typing = 0;
on(document, "input", "[data-filter]", (_, input) => {
  clearTimeout(typing);
  typing = setTimeout(
    () =>
      history.replaceState(null, "", withQuery({ ...clears(input), [input.dataset.filter]: input.value })) ??
      navigate(),
    200,
  );
});
on(document, "change", "[data-choice]", (_, select) =>
  go(withQuery({ ...clears(select), [select.dataset.choice]: select.value })),
);

// Beginning

async function begin() {
  try {
    me = await whoAmI();
  } catch (error) {
    if (error instanceof ApiError && (error.status === 401 || error.status === 403)) {
      signIn(token.get() ? error.message : "");
      return;
    }
    me = { subject: null, role: "read_only", authentication: false };
    setTimeout(begin, 2000); // the broker does not answer: try again
  }
  start();
  navigate();
}

if (localStorage.getItem("penstock.theme"))
  document.documentElement.dataset.theme = localStorage.getItem("penstock.theme");
followPointer(app);
followRows(app, go);
watch(() => {
  if (live.state === "refused") signIn("This token is no longer valid.");
  else if (page) draw();
});
addEventListener("hashchange", navigate);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && page) refresh();
});
begin();
