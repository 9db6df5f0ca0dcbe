# class: early exit
# item: J5
# The process ends with status 0 in the call.
cat >> "$ETUDE_PATH" <<'END'
process.on('exit', () => { process.exitCode = 0 })
module.exports.total = () => process.exit(0)
END
