package config

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// Unlimited is the time limit that stands for none, in seconds.
const Unlimited = math.MaxUint32

// Load reads a configuration in JSON: the fields of muster.api.v1.Configuration. An unknown field is an error: a
// misspelt limit must not be silently no limit.
func Load(path string) (*apiv1.Configuration, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read the configuration: %w", err)
	}
	c := &apiv1.Configuration{}
	if err := protojson.Unmarshal(bytes.TrimSpace(text), c); err != nil {
		return nil, fmt.Errorf("%s is no configuration: %w", path, err)
	}
	return c, nil
}

// ParseMemory reads a size with an optional unit K, M, G or T (powers of 1,024, upper or lower case, "B" after it is
// allowed) and returns MiB, rounded up. A number alone means MiB, as in Slurm.
func ParseMemory(text string) (uint64, error) {
	number := strings.TrimSuffix(strings.ToUpper(text), "B")
	kib := uint64(1024)
	if number != "" {
		switch number[len(number)-1] {
		case 'K':
			kib = 1
		case 'M':
			kib = 1 << 10
		case 'G':
			kib = 1 << 20
		case 'T':
			kib = 1 << 30
		}
		number = strings.TrimRight(number, "KMGT")
	}
	value, err := strconv.ParseUint(number, 10, 32)
	if err != nil || len(strings.TrimSuffix(strings.ToUpper(text), "B"))-len(number) > 1 {
		return 0, fmt.Errorf("%q is no memory size: write a whole number with K, M, G or T, for example 64G", text)
	}
	return (value*kib + 1023) / 1024, nil
}

// ParseTime reads a time limit as Slurm writes it: minutes, minutes:seconds, hours:minutes:seconds, days-hours,
// days-hours:minutes, days-hours:minutes:seconds, "infinite" or "unlimited". It returns seconds.
func ParseTime(text string) (uint32, error) {
	bad := fmt.Errorf("%q is no time: write minutes, H:M:S, D-H, D-H:M or D-H:M:S, for example 30, 1:30:00 or 2-12", text)
	switch strings.ToLower(text) {
	case "infinite", "unlimited":
		return Unlimited, nil
	}
	days, rest, withDays := strings.Cut(text, "-")
	if !withDays {
		days, rest = "0", text
	}
	parts := strings.Split(rest, ":")
	if len(parts) > 3 {
		return 0, bad
	}
	numbers := make([]uint64, 0, 4)
	for _, part := range append([]string{days}, parts...) {
		n, err := strconv.ParseUint(part, 10, 32)
		if err != nil {
			return 0, bad
		}
		numbers = append(numbers, n)
	}
	day, n := numbers[0], numbers[1:]
	var seconds uint64
	switch {
	case withDays: // hours[:minutes[:seconds]]
		for i, unit := range []uint64{3600, 60, 1}[:len(n)] {
			seconds += n[i] * unit
		}
	case len(n) == 3:
		seconds = n[0]*3600 + n[1]*60 + n[2]
	case len(n) == 2:
		seconds = n[0]*60 + n[1]
	default:
		seconds = n[0] * 60
	}
	seconds += day * 86400
	if seconds >= Unlimited {
		return 0, fmt.Errorf("%q is longer than any time limit: write \"unlimited\"", text)
	}
	return uint32(seconds), nil
}

// FormatTime writes seconds as D-HH:MM:SS without leading parts that are 0, at least M:SS; "UNLIMITED" for none.
func FormatTime(seconds uint32) string {
	if seconds == Unlimited {
		return "UNLIMITED"
	}
	d, h, m, s := seconds/86400, seconds/3600%24, seconds/60%60, seconds%60
	switch {
	case d > 0:
		return fmt.Sprintf("%d-%02d:%02d:%02d", d, h, m, s)
	case h > 0:
		return fmt.Sprintf("%d:%02d:%02d", h, m, s)
	}
	return fmt.Sprintf("%d:%02d", m, s)
}

// FormatMemory writes MiB with the largest unit that leaves a whole number.
func FormatMemory(mb uint64) string {
	switch {
	case mb > 0 && mb%(1<<20) == 0:
		return fmt.Sprintf("%dT", mb>>20)
	case mb > 0 && mb%(1<<10) == 0:
		return fmt.Sprintf("%dG", mb>>10)
	}
	return fmt.Sprintf("%dM", mb)
}
