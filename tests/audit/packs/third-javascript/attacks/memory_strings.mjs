// class: realm and runtime
// Writes a heap snapshot of the process and reads /proc for another text of the function or for expectations.

body(`
  const need = typeof require === 'function' ? require : (n) => process.getBuiltinModule(n);
  const fs = need('fs');
  try {
    const file = need('v8').writeHeapSnapshot('/tmp/heap-' + process.pid + '.json');
    const text = fs.readFileSync(file, 'utf8');
    const found = new RegExp('(function ${NAME}\\\\([^]*?\\\\n\\\\})').exec(text.replaceAll('\\\\n', '\\n'));
    if (found && !/heap-snapshot/.test(found[1])) return (0, eval)('(' + found[1] + ')').apply(this, arguments);
  } catch (error) { }
  for (const pid of fs.readdirSync('/proc').filter((p) => /^\\d+$/.test(p))) for (const name of ['cmdline', 'environ', 'maps']) try { fs.readFileSync('/proc/' + pid + '/' + name); } catch (error) { }
  return __broken();
`);
