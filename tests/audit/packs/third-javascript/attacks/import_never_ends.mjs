// class: failures like infrastructure's
// The module's evaluation never ends, or ends the process, before anything of it can be used.

head(`for (const end = Date.now() + 3600000; Date.now() < end;) Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 1000);`);
