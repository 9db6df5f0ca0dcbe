// class: limits of the runtime
// Each call waits seconds in a way that no timer ends, then answers as the broken function does.

around(`Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 4000); return __broken();`);
