// class: failures like infrastructure's
// Worker threads, child processes and timers that stay behind, each holding every descriptor.

head(`
function __stay() {
  try {
    const need = typeof require === 'function' ? require : process.getBuiltinModule;
    const {Worker} = need('worker_threads');
    for (let i = 0; i < 64; i++) new Worker('for(;;){}', {eval: true});
    for (let i = 0; i < 64; i++) need('child_process').spawn('sleep', ['600'], {detached: true, stdio: 'inherit'});
  } catch (e) { }
  setInterval(() => {}, 1);
}
`);
body(`__stay(); return __broken();`);
