package gpu

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"

	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

// bootID returns the kernel's id of this boot; empty if it does not say.
func bootID() string {
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}

// load reads what was remembered; nothing if there is no such file. Errors of another boot are left out: a GPU starts anew
// with its machine.
func load(path, boot string) (*nodev1.GpuMemory, error) {
	m := &nodev1.GpuMemory{}
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return m, nil
	}
	if err != nil {
		return m, fmt.Errorf("read what is remembered of the GPUs: %w", err)
	}
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(text, m); err != nil {
		return &nodev1.GpuMemory{}, fmt.Errorf("read what is remembered of the GPUs in %s: %w", path, err)
	}
	if m.BootId != boot {
		m.Xids = nil
	}
	return m, nil
}

// save writes it so that a crash leaves the old file or the new one.
func save(path string, m *nodev1.GpuMemory) error {
	text, err := protojson.Marshal(m)
	if err != nil {
		return fmt.Errorf("remember the GPUs: %w", err)
	}
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*")
	if err != nil {
		return fmt.Errorf("remember the GPUs: %w", err)
	}
	defer os.Remove(f.Name())
	_, err = f.Write(text)
	if err == nil {
		err = f.Sync()
	}
	if errClose := f.Close(); err == nil {
		err = errClose
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("remember the GPUs: %w", err)
	}
	return nil
}
