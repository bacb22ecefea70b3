// SPDX-License-Identifier: Apache-2.0
// Opens the stream of figures while the other scripts load, and keeps what arrives until then.

const early = [];
let receive = (...news) => early.push(news);
let lose = () => {};
const stream = new EventSource("feed");
for (const kind of ["whole", "news"]) stream.addEventListener(kind, (event) => receive(kind, JSON.parse(event.data)));
stream.addEventListener("error", () => lose());

// From now on `taker` receives each message, at first those so far; `loser` runs when the server is out of reach.
export function follow(taker, loser) {
  [receive, lose] = [taker, loser];
  for (const news of early.splice(0)) receive(...news);
  if (stream.readyState === EventSource.CLOSED) lose();
}

export const endFeed = () => stream.close();
