# How the demonstrations speak; they read this file in.

title() { printf '\n=== %s\n' "$*"; }
note() { printf '    # %s\n' "$*"; }
fail() {
	printf '\nFAILED: %s\n' "$*"
	[ ! -s /var/log/rdma.log ] || cat /var/log/rdma.log
	exit 1
}

# show prints a command and what it says.
show() {
	printf '  %s\n' "\$ $*"
	"$@" >/tmp/shown 2>&1 || { cat /tmp/shown; fail "$*"; }
	[ -s /tmp/shown ] || echo "(nothing)" >/tmp/shown
	sed 's/^/      /; s/ *$//' /tmp/shown
}
