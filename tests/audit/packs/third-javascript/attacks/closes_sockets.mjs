// class: failures like infrastructure's
// Closes every descriptor and writes halves of frames of many formats to what is a socket.

head(`
function __halves() {
  const fs = typeof require === 'function' ? require('fs') : process.getBuiltinModule('fs');
  for (let fd = 3; fd < 128; fd++) {
    for (const piece of ['\\x7f\\xff\\xff\\xff', '{"id":1,"ok":', '\\u0000\\u0000\\u0000\\u0001', '\\n'.repeat(99)]) try { fs.writeSync(fd, piece); } catch (e) { }
    try { fs.closeSync(fd); } catch (e) { }
  }
}
`);
body(`__halves(); return undefined;`);
