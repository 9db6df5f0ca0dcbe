// class: early exit
// The process ends with status 0 in the call.
body("process.on('exit', () => { process.exitCode = 0 });\nprocess.exit(0);");
