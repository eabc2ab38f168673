// The search runs in a web worker, and browsers start none for a page opened from disk (file://).
// There, and only there, the worker's script runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.scope = frame.contentWindow;
      this.scope.document.open(); // or the frame's own empty page might come later and undo this
      this.scope.document.write("<!doctype html><body></body>");
      this.scope.document.close();
      this.scope.postMessage = (data) =>
        this.dispatchEvent(new MessageEvent("message", { data }));
      this.loaded = new Promise((resolve, reject) => {
        const script = this.scope.document.createElement("script");
        script.src = url;
        script.onload = resolve;
        script.onerror = reject;
        this.scope.document.body.appendChild(script);
      });
    }

    postMessage(data) {
      this.loaded.then(() =>
        this.scope.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
