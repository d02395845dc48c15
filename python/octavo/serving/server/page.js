// Shows what /events says of the cache: a cell a page, in the colour of the sequence that holds it.

const RETRY_MS = 1000;
const CELL = { smallest: 6, largest: 18, gap: 1 }; // CSS pixels
const KINDS = { "-1": "--free", "-2": "--cached", "-3": "--shared", "-4": "--reserved" };
const KEY = "octavo-api-key";

const byId = (id) => document.getElementById(id);
let last = null;

// The golden ratio spreads hues evenly; red means something else.
function colourOf(owner) {
  if (owner < 0) return getComputedStyle(document.documentElement).getPropertyValue(KINDS[owner]).trim();
  const turn = (owner * 0.61803398875) % 1;
  return `hsl(${(0.07 + 0.86 * turn) * 360} 55% 58%)`;
}

function draw(canvas, group) {
  const width = canvas.clientWidth;
  const pages = group.num_pages;
  const fitting = Math.floor(Math.sqrt((width * 360) / pages)); // in some 360 pixels of height
  const cell = Math.min(CELL.largest, Math.max(CELL.smallest, fitting));
  const columns = Math.max(1, Math.floor(width / cell));
  const rows = Math.ceil(pages / columns);
  const scale = window.devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = rows * cell * scale;
  canvas.style.height = `${rows * cell}px`;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  let page = 0;
  for (const [owner, length] of group.runs) {
    context.fillStyle = colourOf(owner);
    for (const end = page + length; page < end; page++) {
      const x = (page % columns) * cell;
      const y = Math.floor(page / columns) * cell;
      context.fillRect(x, y, cell - CELL.gap, cell - CELL.gap);
    }
  }
}

function canvasesFor(groups) {
  const parent = byId("groups");
  while (parent.children.length < groups.length) {
    const section = document.createElement("section");
    section.append(document.createElement("h2"), document.createElement("canvas"));
    parent.append(section);
  }
  return [...parent.children].map((section) => [section.firstChild, section.lastChild]);
}

function item({ owner, tokens, pages }) {
  const line = document.createElement("li");
  const patch = document.createElement("i");
  patch.style.background = colourOf(owner);
  line.append(patch, `${tokens} tokens, ${pages} ${pages === 1 ? "page" : "pages"} of its own`);
  return line;
}

function show(now) {
  last = now;
  const sum = (name) => now.groups.reduce((total, group) => total + group[name], 0);
  const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)} %` : "none");
  const slots = now.groups.reduce((total, group) => total + group.num_used_pages * group.page_size, 0);
  const numbers = {
    model: now.model,
    tokens_per_second: now.tokens_per_second.toFixed(1),
    running: now.running,
    waiting: now.waiting,
    hit_rate: percent(now.found_tokens, now.asked_tokens),
    used: `${sum("num_used_pages")} / ${sum("num_pages")}`,
    waste: slots ? percent(slots - sum("num_stored_tokens"), slots) : "none",
    preemptions: now.num_preemptions,
  };
  for (const [id, value] of Object.entries(numbers)) byId(id).textContent = value;
  byId("live").hidden = false;
  canvasesFor(now.groups).forEach(([title, canvas], index) => {
    const group = now.groups[index];
    const name = now.groups.length > 1 ? `group ${index}: ` : "";
    title.textContent = `${name}${group.num_pages} pages of ${group.page_size} tokens, ${group.num_shared_pages} shared`;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${group.num_used_pages} of ${group.num_pages} pages are used`);
    draw(canvas, group);
  });
  byId("sequences").replaceChildren(...now.sequences.map(item));
}

// EventSource cannot send a key.
async function follow() {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const response = await fetch("/events", { headers, cache: "no-store" });
  byId("login").hidden = response.status !== 401;
  if (response.status === 401) return "locked";
  if (!response.ok) throw new Error(`status ${response.status}`);
  byId("state").textContent = "live";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the server has stopped");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    if (!events.length) continue;
    const now = JSON.parse(events.at(-1).slice("data: ".length));
    if (now.error) throw new Error(now.error.message);
    show(now);
  }
}

async function run() {
  for (;;) {
    try {
      if ((await follow()) === "locked") {
        byId("state").textContent = sessionStorage.getItem(KEY) ? "the key is wrong" : "locked";
        return;
      }
    } catch (error) {
      byId("state").textContent = `no connection (${error.message}); trying again`;
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value);
  run();
});
window.addEventListener("resize", () => last && show(last));
run();
