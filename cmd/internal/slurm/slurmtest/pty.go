package slurmtest

import (
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// Pty opens a terminal of so many lines and columns: what is written to keyboard is typed on it. Both ends are closed with the test.
func Pty(t testing.TB, rows, columns uint16) (keyboard, terminal *os.File) {
	t.Helper()
	keyboard, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skip("no pseudo terminals here: ", err)
	}
	t.Cleanup(func() { keyboard.Close() })
	fd := int(keyboard.Fd())
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal("unlock the terminal: ", err)
	}
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		t.Fatal("find the terminal: ", err)
	}
	terminal, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal("open the terminal: ", err)
	}
	t.Cleanup(func() { terminal.Close() })
	Resize(t, terminal, rows, columns)
	return keyboard, terminal
}

// Resize changes the size of a terminal; a program on it is not told.
func Resize(t testing.TB, terminal *os.File, rows, columns uint16) {
	t.Helper()
	if err := unix.IoctlSetWinsize(int(terminal.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: columns}); err != nil {
		t.Fatal("set the size of the terminal: ", err)
	}
}

// Mode is how a terminal treats keys; equal modes are equal texts.
func Mode(t testing.TB, terminal *os.File) string {
	t.Helper()
	mode, err := unix.IoctlGetTermios(int(terminal.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal("read the mode of the terminal: ", err)
	}
	return fmt.Sprint(*mode)
}
