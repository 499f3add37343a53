package supervise

import (
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// bootTime is CLOCK_BOOTTIME in nanoseconds. 0 as a time means "never".
type bootTime int64

func (t bootTime) add(d time.Duration) bootTime { return t + bootTime(d) }

// reached reports whether a time that is set has come.
func (t bootTime) reached(now bootTime) bool { return t != 0 && now >= t }

// sooner returns the earlier of two times.
func sooner(a, b bootTime) bootTime {
	if a == 0 || (b != 0 && b < a) {
		return b
	}
	return a
}

// alarm wakes the loop at a boot time. Go's own timers stand still while the machine sleeps.
type alarm struct {
	file *os.File
	fd   int
	set  bootTime
	c    chan struct{}
	done chan struct{}
}

func newAlarm() (*alarm, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_BOOTTIME, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("making a boot-time timer: %w", err)
	}
	a := &alarm{file: os.NewFile(uintptr(fd), "alarm"), fd: fd, c: make(chan struct{}, 1), done: make(chan struct{})}
	go a.wait()
	return a, nil
}

// wait turns expirations into wake-ups until the file is closed.
func (a *alarm) wait() {
	defer close(a.done)
	var count [8]byte
	for {
		if _, err := a.file.Read(count[:]); err != nil {
			return
		}
		select {
		case a.c <- struct{}{}:
		default:
		}
	}
}

// at sets the alarm; 0 switches it off. A time in the past wakes at once.
func (a *alarm) at(t bootTime) error {
	if t == a.set {
		return nil
	}
	spec := unix.ItimerSpec{Value: unix.NsecToTimespec(int64(max(t, 0)))}
	if err := unix.TimerfdSettime(a.fd, unix.TFD_TIMER_ABSTIME, &spec, nil); err != nil {
		return fmt.Errorf("setting the boot-time timer: %w", err)
	}
	a.set = t
	return nil
}

// fired forgets the time that was set, so that the same one can be set again.
func (a *alarm) fired() { a.set = -1 }

func (a *alarm) close() {
	_ = a.file.Close()
	<-a.done
}
