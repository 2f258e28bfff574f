// The page's one WebSocket: requests by id, the key as first frame, and a new connection when one is lost.

const KEY = "octavo-key";
const SHORTEST_WAIT = 500;
const LONGEST_WAIT = 10_000;

export class Connection {
  // `onState` is told "connecting", "open", "lost" or "key"; `onFault` errors that concern no request.
  constructor(onState, onFault) {
    this.onState = onState;
    this.onFault = onFault;
    this.requests = new Map();
    this.number = 0;
    this.wait = SHORTEST_WAIT;
    this.socket = null;
  }

  open() {
    this.onState("connecting");
    // Beside the page, which a proxy may have put under a path of its own.
    const url = new URL("v1/stream", location.href);
    url.protocol = location.protocol === "https:" ? "wss:" : "ws:";
    const socket = (this.socket = new WebSocket(url));
    let refused = false;
    socket.onopen = () => {
      const key = sessionStorage.getItem(KEY);
      if (key !== null) socket.send(JSON.stringify({ type: "auth", key }));
      this.onState("open");
    };
    socket.onmessage = (event) => {
      const frame = JSON.parse(event.data);
      this.wait = SHORTEST_WAIT;
      if (frame.id === null) {
        refused ||= frame.error.code === "invalid_api_key";
        if (!refused) this.onFault(frame.error.message);
        return;
      }
      const handlers = this.requests.get(frame.id);
      if (frame.type === "done" || frame.type === "error") this.requests.delete(frame.id);
      handlers?.[frame.type]?.(frame);
    };
    socket.onclose = () => {
      const lost = [...this.requests.values()];
      this.requests.clear();
      for (const handlers of lost) {
        handlers.error?.({ error: { message: "the connection to the server was lost" } });
      }
      if (refused) {
        const had = sessionStorage.getItem(KEY) !== null;
        sessionStorage.removeItem(KEY);
        this.onState("key", had);
        return;
      }
      this.onState("lost");
      setTimeout(() => this.open(), this.wait);
      this.wait = Math.min(2 * this.wait, LONGEST_WAIT);
    };
  }

  useKey(key) {
    sessionStorage.setItem(KEY, key);
    this.open();
  }

  get isOpen() {
    return this.socket?.readyState === WebSocket.OPEN;
  }

  // Send a request; `handlers` are called with its frames, by their type. Returns a function that cancels it.
  request(type, fields, handlers) {
    const id = `${type}-${++this.number}`;
    this.requests.set(id, handlers);
    this.socket.send(JSON.stringify({ type, id, ...fields }));
    return () => {
      if (this.requests.has(id) && this.isOpen) this.socket.send(JSON.stringify({ type: "cancel", id }));
    };
  }
}
