package vault

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"filippo.io/age"
)

// Names in the data folder.
const (
	// MasterFile holds the encrypted master key.
	MasterFile = "master.key"
	// IdentityFile holds the age identity that decrypts it, unless another
	// path is given.
	IdentityFile = "master.identity"
)

// maxKeyFile bounds what is read of a key file, which is some hundred bytes.
const maxKeyFile = 64 << 10

// magic is the first line of the plaintext in master.key; a version follows
// from it.
const magic = "planaria master key v1\n"

// FileError is a trouble with a key file, with the way out.
type FileError struct {
	File string
	Err  error
	hint string
}

// Error names the file and the cause.
func (e *FileError) Error() string { return fmt.Sprintf("master key: %s: %v", e.File, e.Err) }

// Unwrap returns the cause.
func (e *FileError) Unwrap() error { return e.Err }

// Hint says what to do about it, one sentence for a terminal.
func (e *FileError) Hint() string { return e.hint }

// OpenMaster reads the master key of a data folder. identity is the path of the
// age identity file; empty means IdentityFile in dir. ErrNoMaster when there is
// no key, ErrWrongKey when the identity is not the one it was encrypted to,
// ErrDamaged. Errors that a person can mend are *FileError with a Hint.
func OpenMaster(dir, identity string) (*Master, error) {
	file := filepath.Join(dir, MasterFile)
	sealed, err := readPrivate(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, &FileError{file, ErrNoMaster, "restore the file from a backup; without it nothing sealed in this data folder can be read"}
	}
	if err != nil {
		return nil, err
	}
	id, err := readIdentity(identityPath(dir, identity))
	if err != nil {
		return nil, err
	}
	return decrypt(file, sealed, id)
}

// CreateMaster makes the master key of a data folder and is durable when it
// returns. An identity file that exists is used, else it is made. It refuses
// with ErrMasterExists when the folder has a key, and never overwrites one.
func CreateMaster(dir, identity string) (*Master, error) {
	file := filepath.Join(dir, MasterFile)
	if _, err := os.Lstat(file); err == nil {
		return nil, &FileError{file, ErrMasterExists, "open it, or start with an empty data folder"}
	}

	// 1. The identity is durable. A crash from here until step 2 leaves an
	// identity that opens nothing yet; the next CreateMaster uses it.
	idFile := identityPath(dir, identity)
	id, err := readIdentity(idFile)
	if errors.Is(err, fs.ErrNotExist) {
		id, err = createIdentity(idFile)
	}
	if err != nil {
		return nil, err
	}

	// 2. The key is durable. Before this nothing can have been sealed under it.
	key := make([]byte, keySize)
	if _, err := rand.Read(key); err != nil {
		return nil, fmt.Errorf("create master key: %w", err)
	}
	sealed, err := encrypt(key, id)
	if err != nil {
		return nil, fmt.Errorf("create master key: %w", err)
	}
	if err := writeNew(file, sealed); errors.Is(err, fs.ErrExist) {
		return nil, &FileError{file, ErrMasterExists, "another process made it at this moment; open it"}
	} else if err != nil {
		return nil, &FileError{file, err, "the folder must exist and be writable"}
	}

	// 3. Read back: what the disk holds is what opens.
	return OpenMaster(dir, identity)
}

func identityPath(dir, identity string) string {
	if identity == "" {
		return filepath.Join(dir, IdentityFile)
	}
	return identity
}

func encrypt(key []byte, id *age.X25519Identity) ([]byte, error) {
	var out bytes.Buffer
	w, err := age.Encrypt(&out, id.Recipient())
	if err != nil {
		return nil, err
	}
	m := newMaster(key)
	if _, err := fmt.Fprintf(w, "%s%s\n%s", magic, m.ID(), key); err != nil {
		return nil, err
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

// decrypt opens the bytes of master.key: magic, check value, key.
func decrypt(file string, sealed []byte, id *age.X25519Identity) (*Master, error) {
	damaged := func(err error) error {
		return &FileError{file, fmt.Errorf("%w: %w", ErrDamaged, err), "restore the file from a backup"}
	}
	r, err := age.Decrypt(bytes.NewReader(sealed), id)
	if _, no := errors.AsType[*age.NoIdentityMatchError](err); no {
		return nil, &FileError{file, fmt.Errorf("%w: it was encrypted to another identity", ErrWrongKey),
			"give the identity file that was in use when the data folder was made (--master-identity FILE)"}
	}
	if err != nil {
		return nil, damaged(err)
	}
	plain, err := io.ReadAll(r)
	if err != nil {
		return nil, damaged(err)
	}
	rest, ok := strings.CutPrefix(string(plain), magic)
	if !ok || len(rest) != 2*keyIDSize+1+keySize {
		return nil, damaged(errors.New("not a master key of this version"))
	}
	m := newMaster([]byte(rest[2*keyIDSize+1:]))
	if rest[:2*keyIDSize] != m.ID() {
		return nil, damaged(errors.New("check value does not match"))
	}
	return m, nil
}

func createIdentity(file string) (*age.X25519Identity, error) {
	id, err := age.GenerateX25519Identity()
	if err != nil {
		return nil, fmt.Errorf("create identity %s: %w", file, err)
	}
	text := fmt.Sprintf("# Opens %s of a Planaria data folder. Keep a copy apart from backups of the folder.\n# public key: %s\n%s\n",
		MasterFile, id.Recipient(), id)
	if err := writeNew(file, []byte(text)); errors.Is(err, fs.ErrExist) {
		return readIdentity(file) // made by another process at this moment
	} else if err != nil {
		return nil, &FileError{file, err, "the folder of the identity file must exist and be writable"}
	}
	return id, nil
}

// readIdentity reads the one X25519 identity of a file. fs.ErrNotExist when
// there is no file.
func readIdentity(file string) (*age.X25519Identity, error) {
	const hint = "make one with: age-keygen -o FILE (no passphrase), or restore it from a backup"
	data, err := readPrivate(file)
	if err != nil {
		return nil, err
	}
	ids, err := age.ParseIdentities(bytes.NewReader(data))
	if err != nil {
		// The text of the parser may quote a line of the file, so it is dropped.
		return nil, &FileError{file, errors.New("not an age identity file"), hint}
	}
	if len(ids) != 1 {
		return nil, &FileError{file, fmt.Errorf("%d identities, want one", len(ids)), hint}
	}
	id, ok := ids[0].(*age.X25519Identity)
	if !ok {
		return nil, &FileError{file, errors.New("not an X25519 identity"), hint}
	}
	return id, nil
}

// readPrivate reads a small file that only its owner may touch.
func readPrivate(file string) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		hint := "check --data and --master-identity"
		if errors.Is(err, fs.ErrPermission) {
			hint = "run as the owner of the file"
		}
		return nil, &FileError{file, cause(err), hint}
	}
	defer f.Close()
	// The open file is looked at, not the name, so that it cannot be swapped.
	info, err := f.Stat()
	if err != nil {
		return nil, &FileError{file, cause(err), "check the file system"}
	}
	if !info.Mode().IsRegular() {
		return nil, &FileError{file, errors.New("not a regular file"), "check --data and --master-identity"}
	}
	if perm := info.Mode().Perm(); perm&0o077 != 0 {
		return nil, &FileError{file, fmt.Errorf("mode %04o lets others in", perm), "chmod 600 " + file}
	}
	data, err := io.ReadAll(io.LimitReader(f, maxKeyFile+1))
	if err != nil {
		return nil, &FileError{file, cause(err), "check the file system"}
	}
	if len(data) > maxKeyFile {
		return nil, &FileError{file, fmt.Errorf("larger than %d bytes", maxKeyFile), "check --data and --master-identity"}
	}
	return data, nil
}

// writeNew makes file with mode 0600: durable on return, and never in place of
// an existing one (fs.ErrExist).
func writeNew(file string, data []byte) error {
	dir := filepath.Dir(file)
	// 1. Bytes under a temporary name. A crash here leaves a file that nobody
	// reads; the next call uses another name.
	f, err := os.CreateTemp(dir, ".tmp-key-*") // mode 0600
	if err != nil {
		return cause(err)
	}
	defer os.Remove(f.Name())
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return cause(err)
	}
	// 2. The name. A link, since a rename would replace a key that another
	// process made at this moment. A crash here leaves no name or the whole file.
	if err := os.Link(f.Name(), file); err != nil {
		return cause(err)
	}
	// 3. The name is durable.
	return syncDir(dir)
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return cause(err)
	}
	defer d.Close()
	return d.Sync()
}

// cause strips the path from an error that will be wrapped with the path again.
func cause(err error) error {
	if p, ok := errors.AsType[*fs.PathError](err); ok {
		return p.Err
	}
	if l, ok := errors.AsType[*os.LinkError](err); ok {
		return l.Err
	}
	return err
}
