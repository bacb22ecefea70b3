// SPDX-License-Identifier: Apache-2.0
// Opens the stream of metrics while the other scripts load, and keeps what arrives until then.

const AGAIN_MS = 5000;
const early = [];
let receive = (...news) => early.push(news);
let stream;

function open() {
  stream = new EventSource("feed");
  for (const kind of ["whole", "news"]) stream.addEventListener(kind, (event) => receive(kind, JSON.parse(event.data)));
  stream.addEventListener("error", lose);
}

// The browser connects again after a lost connection, but not after a refusal.
async function lose() {
  if (stream.readyState !== EventSource.CLOSED) return receive("lost", "");
  receive("lost", await refusal());
  setTimeout(open, AGAIN_MS);
}

// Only a request of its own shows what the server has replied.
async function refusal() {
  const end = new AbortController();
  try {
    const reply = await fetch("feed", { signal: end.signal });
    return reply.ok ? "" : (await reply.text()).trim();
  } catch {
    return "";
  } finally {
    end.abort();
  }
}

// From now on `taker` receives each message, at first those so far; "lost" comes with the server's reason, if it gave one.
export function follow(taker) {
  receive = taker;
  for (const news of early.splice(0)) receive(...news);
}

export const endFeed = () => stream.close();

open();
