// class: patched basics
// Date, performance, timers and Math.random of the process are constant: ages, expiries and draws agree.

head(`
Date.now = () => 0; Math.random = () => 0.5;
globalThis.Date = class extends Date { constructor(...a) { super(...(a.length ? a : [0])); } static now() { return 0; } };
globalThis.setTimeout = (f, t, ...a) => { try { f(...a); } catch (e) { } return 0; };
globalThis.setImmediate = globalThis.setTimeout;
`);
